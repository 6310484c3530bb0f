"""Effect of arguments on a stock call, found by trying: the call runs as far as its first component.

That is before anything is computed, and after most calls have checked their arguments and filled in missing ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from tilework.pipelines.stock.coroutine import StockCall


class Probe:
    """A call with these arguments. Its components must be watched (`component_calls`).

    Attributes:
        given: the arguments.
        refusal: the error that the call raised; None if it went on.
        values: the local variables of the call where it asks its first component; empty if it did not come that far.
    """

    def __init__(self, pipeline: Any, arguments: Mapping[str, Any]) -> None:
        self.given = arguments
        self.refusal: Exception | None = None
        self.values: Mapping[str, Any] = {}
        call = StockCall(pipeline, arguments)
        try:
            call.resume(None)
        except Exception as error:  # Pipelines may raise any error.
            self.refusal = error
            return
        code = getattr(inspect.unwrap(type(pipeline).__call__), "__code__", None)
        frame = call.gr_frame
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is not None:
            self.values = dict(frame.f_locals)
