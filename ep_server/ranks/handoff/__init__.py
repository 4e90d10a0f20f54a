"""KV hand-off: a rank serves the KV blocks of its prompts to ranks of other servers, and fetches theirs."""
