"""The error tree: every class has a status that gRPC knows, and the drawing shows every class."""

from __future__ import annotations

import pickle

import grpc

from ep_server import errors
from ep_server.errors import EpServerError


def tree(root: type[EpServerError]) -> list[type[EpServerError]]:
    return [root, *(found for child in root.__subclasses__() for found in tree(child))]


def test_every_status_is_one_of_grpc() -> None:
    for error in tree(EpServerError):
        assert error.status in grpc.StatusCode.__members__, error


def test_the_drawing_shows_every_class_of_the_file() -> None:
    drawn = errors.__doc__ or ""
    for error in tree(EpServerError):
        if error.__module__ == errors.__name__ and error is not errors.FieldError:
            assert error.__name__ in drawn, error


def test_every_error_pickles_with_its_attributes() -> None:
    made = [
        errors.PeerTimeout("vote", "gather", 0, 2, 7, 6),
        errors.InvalidArgument("top_p", 2.0, "0 to 1"),
        errors.ConfigError("port", -1, "at least 0"),
        errors.QueueFull("full", 250),
        errors.GroupAborted("aborted"),
    ]
    for error in made:
        error.add_note("said by rank 1")
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error)
        assert str(back) == str(error)
        assert vars(back) == vars(error)
