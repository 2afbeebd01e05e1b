"""The benchmark's problem as a Flower app: a ClientApp that trains one user, and a ServerApp that owns its loop.

Which user a node trains stands in the message, so that there need not be a node for each: Flower's simulation looks
through all messages for every node, over and over, and 1,000 nodes keep it busy.

A module of its own because Ray's actors import it: what `resident` has made stays in an actor's memory from message to
message.
"""

from __future__ import annotations

import functools
import random
import time

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from benchmarks.cifar10 import BATCH, CNN, COHORT, DEVICE, EACH, LR, STEPS, USERS, samples

client = ClientApp()
Orders = dict[int, torch.Tensor]


@functools.cache
def resident(threads: int, dropout: bool) -> tuple[torch.Tensor, torch.Tensor, CNN]:
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    x, y = samples()
    return (x.float() / 255).to(DEVICE), y.to(DEVICE), CNN(dropout=dropout).to(DEVICE)


@client.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    x, y, model = resident(config["threads"], config["dropout"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), LR)
    order = torch.tensor(config["order"]) if "order" in config else config["user"] * EACH + torch.randperm(EACH)
    batches = order.to(DEVICE).split(BATCH)
    for rows in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    done = MetricRecord({"num-examples": EACH, "steps": len(batches)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": done}), reply_to=message)


def average(grid: Grid, sent: list[str], exact: bool) -> dict[str, torch.Tensor]:
    """The mean of the replies, weighted by samples and added up as they come in.

    `exact` adds up in float64. Replies are whole weights, of which a round changes one part in ten thousand; the
    round-off of adding up 50 of them in float32 is 0.2% of that change, more than what two systems may differ by.
    """
    total: dict[str, torch.Tensor] = {}
    waiting, samples, steps = set(sent), 0, 0
    while waiting:
        replies = list(grid.pull_messages(waiting))
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
            weight = int(reply.content["metrics"]["num-examples"])
            for name, sent_back in reply.content["arrays"].to_torch_state_dict().items():
                w = sent_back.double() if exact else sent_back
                total[name] = total[name].add_(w, alpha=weight) if name in total else w * weight
            samples += weight
            steps += int(reply.content["metrics"]["steps"])
            waiting.remove(reply.metadata.reply_to_message_id)
        if not replies:
            time.sleep(0.01)  # send_and_receive sleeps 0.1 s
    if steps != STEPS:
        raise RuntimeError(f"{steps} steps instead of {STEPS}")
    return {name: w.div_(samples) for name, w in total.items()}


def server(
    rounds: int, nodes: int, threads: int, ends: list[float], orders: Orders | None, done: dict[str, torch.Tensor]
) -> ServerApp:
    """FedAvg; `ends` gets the time at which each round is over, `done` the weights after the last.

    With `orders`, every round has these users, with their samples in this order, and no dropout.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        while len(places := list(grid.get_node_ids())) < nodes:
            time.sleep(0.1)
        weights, draw = CNN().state_dict(), random.Random(0)
        for _ in range(rounds):
            arrays, users = ArrayRecord(weights), list(orders or draw.sample(range(USERS), COHORT))
            wishes = [{"user": user, "threads": threads, "dropout": not orders} for user in users]
            if orders:
                wishes = [{**wish, "order": orders[user].tolist()} for user, wish in zip(users, wishes, strict=True)]
            contents = [RecordDict({"arrays": arrays, "config": ConfigRecord(wish)}) for wish in wishes]
            chosen = draw.sample(places, COHORT)
            sent = grid.push_messages([Message(c, node, "train") for c, node in zip(contents, chosen, strict=True)])
            weights = average(grid, list(sent), exact=bool(orders))
            ends.append(time.perf_counter())
        done.update(weights)

    return app
