"""The pages: forms and links that work without the script."""
