"""The served model: parameters in memory, kept fresh by the replica and scored in batches."""
