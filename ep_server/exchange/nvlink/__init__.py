"""The exchange between the GPUs of one host, over NVLink."""
