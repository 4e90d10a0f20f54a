"""Front ends for code written against other libraries."""
