"""How many keys the batch entries of an attention call have, and the pages that they lie in."""
