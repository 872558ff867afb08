"""The pieces of new projects, as `ftlayer.cli.new` composes them."""
