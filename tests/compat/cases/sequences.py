"""Recurrent networks, torch's transformers, graphs and tables."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.compat.case import Cases, Made
from tests.compat.cases.language import token_loss
from tests.compat.samples import (
    graphs,
    labels,
    masked_tokens,
    next_tokens,
    padded_series,
    series,
    table,
    tokens,
    two_inputs,
    vectors,
)

CASES = Cases("sequences")
add = CASES.add
SERIES = series()


# Recurrent layers.
def reader(kind: type[nn.Module], hidden: int = 8, width: int | None = None, **options: Any) -> Any:
    """A recurrent layer and a linear layer on its last output."""

    def last(m: Made, x: Tensor) -> Tensor:
        return m.head(m.rnn(x)[0][:, -1])

    return lambda: Made(last, rnn=kind(5, hidden, batch_first=True, **options), head=nn.Linear(width or hidden, 3))


def sequence_first(m: Made, x: Tensor) -> Tensor:
    return m.head(m.rnn(x.transpose(0, 1))[0][-1])


def learned_start(m: Made, x: Tensor) -> Tensor:
    return m.head(m.rnn(x, m.start.expand(1, len(x), 8).contiguous())[0][:, -1])


def cell_by_cell(m: Made, x: Tensor) -> Tensor:
    h = None
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
    return m.head(h[0] if isinstance(h, tuple) else h)


def packed(m: Made, x: Tensor, lengths: Tensor) -> Tensor:
    _, h = m.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
    return m.head(h[-1])


add("nn.LSTM", reader(nn.LSTM), SERIES)
add("nn.GRU, two layers", reader(nn.GRU, num_layers=2), SERIES)
add("nn.LSTM, sequence first", lambda: Made(sequence_first, rnn=nn.LSTM(5, 8), head=nn.Linear(8, 3)), SERIES)
add("nn.GRU, a learned start", lambda: Made(
    learned_start, rnn=nn.GRU(5, 8, batch_first=True), start=nn.Parameter(torch.randn(1, 1, 8)), head=nn.Linear(8, 3)
), SERIES)  # fmt: skip
add("nn.LSTMCell", lambda: Made(cell_by_cell, cell=nn.LSTMCell(5, 8), head=nn.Linear(8, 3)), SERIES)
add("nn.GRUCell", lambda: Made(cell_by_cell, cell=nn.GRUCell(5, 8), head=nn.Linear(8, 3)), SERIES)
add("nn.LSTM, bidirectional", reader(nn.LSTM, bidirectional=True, width=16), SERIES)
add("nn.LSTM, proj_size", reader(nn.LSTM, proj_size=4, width=4), SERIES)
add("nn.RNN", reader(nn.RNN), SERIES, quick=True)
add("nn.GRU, dropout=0.2", reader(nn.GRU, num_layers=2, dropout=0.2), SERIES, draws=True)
add("packed sequences", lambda: Made(packed, rnn=nn.GRU(5, 8, batch_first=True), head=nn.Linear(8, 3)), padded_series())
add("nn.LSTM, FedCurv", reader(nn.LSTM), SERIES, method="FedCurv(weight=0.1)")
add("nn.LSTM, bidirectional, FedNLR", reader(nn.LSTM, bidirectional=True, width=16), SERIES, method="FedNLR()")
add("temporal convolutions", lambda: nn.Sequential(
    nn.Conv1d(9, 8, 3, padding=2, dilation=2), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1), nn.AdaptiveMaxPool1d(2),
    nn.Flatten(), nn.Linear(16, 3)
), SERIES)  # fmt: skip


# torch's transformers.
def encoder(m: Made, x: Tensor, lengths: Tensor | None = None) -> Tensor:
    padding = None if lengths is None else torch.arange(x.shape[1]) >= lengths[:, None]
    return m.head(m.body(m.embed(x), src_key_padding_mask=padding).mean(1))


def encoder_of(dropout: float, **options: Any) -> Any:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True, **options)
        body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return Made(encoder, embed=nn.Linear(5, 8), body=body, head=nn.Linear(8, 3))

    return build


def seq_first(m: Made, x: Tensor) -> Tensor:
    return m.head(m.body(m.embed(x.transpose(0, 1))).mean(0))


def sequence_first_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0)
    body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return Made(seq_first, embed=nn.Linear(5, 8), body=body, head=nn.Linear(8, 3))


def translate(m: Made, source: Tensor, target: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=source.dtype)
    return m.head(m.body(source, target, tgt_mask=mask).mean(1))


def translator(dropout: float) -> Any:
    return lambda: Made(translate, body=nn.Transformer(8, 2, 1, 1, 16, dropout, batch_first=True), head=nn.Linear(8, 3))


def attend(m: Made, x: Tensor) -> Tensor:
    h = m.embed(x)
    return m.head(m.attention(h, h, h, need_weights=False)[0].mean(1))


def attention(dropout: float) -> Any:
    return lambda: Made(
        attend, embed=nn.Linear(5, 8), attention=nn.MultiheadAttention(8, 2, dropout, batch_first=True),
        head=nn.Linear(8, 3),
    )  # fmt: skip


def own_attention(m: Made, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).reshape(len(x), -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=m.p if m.training else 0.0, is_causal=True)
    return m.head(out.transpose(1, 2).flatten(2).mean(1))


PAIRS = two_inputs((7, 8), (6, 8))
add("nn.TransformerEncoder", encoder_of(0.1), SERIES, draws=True)
add("nn.TransformerEncoder, no dropout", encoder_of(0.0), SERIES, quick=True)
add("nn.TransformerEncoder, no dropout, norm first, GELU", encoder_of(0.0, norm_first=True, activation="gelu"), SERIES)
add("nn.TransformerEncoder, no dropout, padding mask", encoder_of(0.0), padded_series())
add("nn.TransformerEncoder, sequence first", sequence_first_encoder, SERIES)
add(
    "nn.TransformerEncoder, sequence first, FedNLR", sequence_first_encoder, SERIES, method="FedNLR()",
)  # fmt: skip
add("nn.Transformer", translator(0.1), PAIRS, draws=True)
add("nn.Transformer, no dropout, tgt_mask", translator(0.0), PAIRS)
add("nn.MultiheadAttention, dropout=0.1", attention(0.1), SERIES, draws=True)
add("nn.MultiheadAttention", attention(0.0), SERIES)
for p in (0.0, 0.2):
    add(f"scaled_dot_product_attention, dropout_p={p}", lambda p=p: Made(
        own_attention, qkv=nn.Linear(5, 24), head=nn.Linear(8, 3), p=p
    ), SERIES, draws=p > 0)  # fmt: skip


# Embeddings.
def pooled(m: Made, x: Tensor) -> Tensor:
    return m.head(m.embed(x).mean(1))


def tied(m: Made, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.mix(m.embed(x))))


def tied_model() -> nn.Module:
    module = Made(tied, embed=nn.Embedding(40, 8), mix=nn.Linear(8, 8), head=nn.Linear(8, 40, bias=False))
    module.head.weight = module.embed.weight
    return module


add("nn.EmbeddingBag", lambda: nn.Sequential(nn.EmbeddingBag(40, 8), nn.Linear(8, 3)), tokens())
add("nn.Embedding, padding_idx", lambda: Made(
    lambda m, input_ids, attention_mask: pooled(m, input_ids), embed=nn.Embedding(40, 8, padding_idx=0),
    head=nn.Linear(8, 3)
), masked_tokens())  # fmt: skip
add("an embedding tied to the head", tied_model, next_tokens(), loss=token_loss)
add("F.linear with the embedding's weight", lambda: Made(
    lambda m, x: F.linear(torch.tanh(m.mix(m.embed(x))), m.embed.weight), embed=nn.Embedding(40, 8), mix=nn.Linear(8, 8)
), next_tokens(), loss=token_loss)  # fmt: skip
add("nn.Embedding, sparse=True", lambda: Made(
    pooled, embed=nn.Embedding(40, 8, sparse=True), head=nn.Linear(8, 3)
), tokens(), quick=True)  # fmt: skip
add("pooled embeddings, CCVR", lambda: Made(
    lambda m, x: m.head(torch.tanh(m.embed(x).mean(1))), embed=nn.Embedding(40, 8), head=nn.Linear(8, 3)
), tokens(), method="CCVR()")  # fmt: skip


# Graphs.
CASES.needs = ("torch_geometric",)


def dense_graphs(m: Made, x: Tensor, adjacency: Tensor) -> Tensor:
    h = torch.relu(m.a(x, adjacency))
    return m.head(m.b(h, adjacency).mean(1))


def dense(kind: str) -> Any:
    def build() -> nn.Module:
        from torch_geometric import nn as geometric

        layer = getattr(geometric, kind)
        return Made(dense_graphs, a=layer(4, 8), b=layer(8, 8), head=nn.Linear(8, 3))

    return build


def edges(m: Made, x: Tensor, adjacency: Tensor) -> Tensor:
    """The batch as one large graph, as PyG's own batches are."""
    n, nodes, width = x.shape
    at, i, j = torch.nonzero(adjacency, as_tuple=True)
    index = torch.stack([at * nodes + i, at * nodes + j])
    h = torch.relu(m.a(x.reshape(n * nodes, width), index))
    return m.head(m.b(h, index).reshape(n, nodes, -1).mean(1))


def sparse(kind: str, **options: Any) -> Any:
    def build() -> nn.Module:
        from torch_geometric import nn as geometric

        layer = getattr(geometric, kind)
        return Made(edges, a=layer(4, 8, **options), b=layer(8, 8, **options), head=nn.Linear(8, 3))

    return build


def isomorphism() -> nn.Module:
    from torch_geometric.nn import GINConv

    def layer(width: int) -> nn.Module:
        return GINConv(nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 8)))

    return Made(edges, a=layer(4), b=layer(8), head=nn.Linear(8, 3))


add("PyG DenseGCNConv", dense("DenseGCNConv"), graphs())
add("PyG DenseSAGEConv", dense("DenseSAGEConv"), graphs())
add("PyG GCNConv, edge_index made in forward", sparse("GCNConv"), graphs())
add("PyG GATConv, edge_index made in forward", sparse("GATConv"), graphs())
add("PyG GATConv, dropout=0.3", sparse("GATConv", dropout=0.3), graphs(), draws=True)
add("PyG GINConv, edge_index made in forward", isomorphism, graphs())

# Tables.
CASES.needs = ("rtdl",)


def ft_transformer(**options: Any) -> Any:
    def build() -> nn.Module:
        import rtdl

        return rtdl.FTTransformer.make_baseline(
            n_num_features=5, cat_cardinalities=[3, 4], d_token=8, n_blocks=2, ffn_d_hidden=16, d_out=3,
            **{"attention_dropout": 0.0, "ffn_dropout": 0.0, "residual_dropout": 0.0, **options},
        )  # fmt: skip

    return build


def rtdl_resnet() -> nn.Module:
    import rtdl

    size = {"d_in": 8, "n_blocks": 2, "d_main": 8, "d_hidden": 16, "d_out": 3}
    return rtdl.ResNet.make_baseline(**size, dropout_first=0.0, dropout_second=0.0)


add("rtdl FT-Transformer (x_num, x_cat)", ft_transformer(), table(names=False))
add("rtdl FT-Transformer, by name", ft_transformer(), table())
add("rtdl FT-Transformer, dropout", ft_transformer(attention_dropout=0.2, ffn_dropout=0.1), table(), draws=True)
add("rtdl ResNet", rtdl_resnet, vectors(8))

CASES.needs = ("pytorch_tabnet",)


def tabnet() -> nn.Module:
    from pytorch_tabnet.tab_network import TabNet

    return TabNet(8, 3, n_d=4, n_a=4, n_steps=2, virtual_batch_size=64, group_attention_matrix=torch.eye(8).double())


add('TabNet, output="0"', tabnet, vectors(8), output="0", local={"lr": 0.01})

CASES.needs = ("tabm",)


def tabm() -> nn.Module:
    from tabm import TabM

    return TabM.make(n_num_features=5, cat_cardinalities=[3, 4], d_out=3, n_blocks=2, d_block=16, dropout=0.0, k=4)


def ensemble_loss(output: Tensor, y: Tensor) -> Tensor:
    """The mean of the members' losses; outputs are samples × members × classes."""
    members = output.shape[1]
    losses = F.cross_entropy(output.flatten(0, 1), y.repeat_interleave(members), reduction="none")
    return losses.reshape(-1, members).mean(1)


add("TabM", tabm, table(), loss=ensemble_loss)
add(
    "TabM, FedNLR",
    tabm,
    table(),
    loss=ensemble_loss,
    method="FedNLR()",
    refused="FedNLR found no linear",
    note="Its layers are products of its own.",
)


# Plain torch again: a series whose classes are labels per step.
CASES.needs = ()


def tagged(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 9, 5, generator=g), labels(g, n * 9, 3).reshape(n, 9)


add("a tagger with a class per step", lambda: Made(
    lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.GRU(5, 8, batch_first=True), head=nn.Linear(8, 3)
), tagged, loss=token_loss)  # fmt: skip
