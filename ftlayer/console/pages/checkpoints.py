"""Checkpoints that lie in directories, for jobs that no driver tells of."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ftlayer.console.rendering import console_of, page
from ftlayer.console.stored import stored_checkpoints

router = APIRouter(include_in_schema=False)


@router.get("/checkpoints")
def checkpoints_page(request: Request) -> Response:
    """Show what lies in the directories that the console was given."""
    found = stored_checkpoints(console_of(request).options.checkpoints)
    return page(request, "stored.html", here="/checkpoints", found=found)
