"""A person's own data: files read from raw bytes, formats recognised, rows inspected and repaired."""
