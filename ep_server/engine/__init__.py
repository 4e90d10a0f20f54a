"""[3] [10] Admits requests, hands them to ranks and delivers their tokens."""
