"""`import deep_ep` for code written against DeepEP."""
