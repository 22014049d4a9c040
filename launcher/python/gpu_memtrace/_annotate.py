"""Named ranges of the program in the recording."""

from __future__ import annotations

import types

from gpu_memtrace import _library

# Type checkers take it for typing.TYPE_CHECKING, without the import.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, AsyncGenerator, Callable, Generator, List, Optional, TypeVar

    F = TypeVar("F", bound=Callable[..., Any])


class annotate:
    """Names a part of the program: ``with annotate("load"): ...`` or ``@annotate("load")``.

    The report and the exports show the range like a range of NVTX. As a decorator of a generator or of an ``async``
    function, it covers the time in which the body runs, and not the time in which the body waits.
    """

    __slots__ = ("_encoded", "_open", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        # A C string ends at its first 0.
        self._encoded = name.replace("\0", " ").encode("utf-8", "replace")
        self._open: List[int] = []

    def __enter__(self) -> "annotate":
        library = _library.library
        if library is not None:
            self._open.append(library.annotation_start(self._encoded))
        return self

    def __exit__(self, *error: object) -> None:
        library = _library.library
        if library is not None and self._open:
            library.annotation_end(self._open.pop())

    def __call__(self, function: F) -> F:
        if _library.library is None:
            return function
        # Imported in a recorded process only: a name without memtrace stays cheap.
        import functools
        import inspect
        from typing import cast

        name = self.name
        if inspect.isasyncgenfunction(function):

            @functools.wraps(function)
            async def async_generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
                inner = function(*args, **kwargs)
                step = inner.__anext__()
                while True:
                    try:
                        item = await _awaited(step, name)
                    except StopAsyncIteration:
                        return
                    try:
                        sent = yield item
                    except GeneratorExit:
                        await _awaited(inner.aclose(), name)
                        raise
                    except BaseException as error:
                        step = inner.athrow(error)
                    else:
                        step = inner.asend(sent)

            return cast("F", async_generator)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def coroutine(*args: Any, **kwargs: Any) -> Any:
                return await _awaited(function(*args, **kwargs), name)

            return cast("F", coroutine)
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
                return (yield from _driven(function(*args, **kwargs), name))

            return cast("F", generator)

        @functools.wraps(function)
        def plain(*args: Any, **kwargs: Any) -> Any:
            with annotate(name):
                return function(*args, **kwargs)

        return cast("F", plain)


def _driven(inner: Any, name: str) -> Generator[Any, Any, Any]:
    """Runs a generator or the iterator of an awaitable. Each resumption of its body is a range."""
    sent: Any = None
    thrown: Optional[BaseException] = None
    while True:
        try:
            with annotate(name):
                if thrown is not None:
                    error, thrown = thrown, None
                    item = inner.throw(error)
                elif sent is None and not hasattr(inner, "send"):
                    item = next(inner)
                else:
                    item = inner.send(sent)
        except StopIteration as end:
            return end.value
        try:
            sent = yield item
        except GeneratorExit:
            with annotate(name):
                inner.close()
            raise
        except BaseException as raised:
            thrown = raised


def _awaited(awaitable: Any, name: str) -> Any:
    """An awaitable whose body runs in ranges."""
    iterator = awaitable if hasattr(awaitable, "send") else awaitable.__await__()
    return _driven_coroutine(iterator, name)


@types.coroutine
def _driven_coroutine(inner: Any, name: str) -> Generator[Any, Any, Any]:
    return (yield from _driven(inner, name))
