"""``ftlayer new``: a small project that runs as it is, composed of files that each are a piece of one.

`ftlayer.cli.scaffold.choices` says what there is to choose from, `ftlayer.cli.scaffold.project` which files make a
project of the choices, `ftlayer.cli.scaffold.project` puts them in place. ``templates/`` has the pieces. They are files
of a project called ``my_project``, and hold no conditions: a choice is a choice of files.
"""
