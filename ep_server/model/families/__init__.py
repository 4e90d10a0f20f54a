"""Model families: from config.json to a ModelSpec."""
