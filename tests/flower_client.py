"""A node's app for tests, in which one node spoils its replies, each round in another way."""

from pathlib import Path

from flower_problem import spoiled

from undrift.flower.apps import client_app
from undrift.flower.node import Node

honest = Node.answer


def answer(self: Node, kind: str, request: bytes) -> bytes:
    reply = honest(self, kind, request)
    return spoiled(reply) if kind == "train" and self.config["name"] == "node-1" else reply


def app_for(file: str):
    Node.answer = answer
    return client_app(Path(file).with_name("experiment.toml"))
