"""The expert-parallel exchange: dispatch and combine."""
