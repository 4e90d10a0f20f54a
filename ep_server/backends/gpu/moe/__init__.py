"""[7] [8] A sparse block on a GPU: router, dispatch, experts, combine."""
