#!/usr/bin/env python3
"""Writes the reference values of test/test_model.c: a tiny GPT-2 in PyTorch.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install torch      (or Debian's python3-torch)
    /tmp/venv/bin/python test/make_fixture.py                         writes test/fixtures/tiny_*

For developers who change the reference; neither the build nor the tests need Python. Everything is
computed in double precision and stored in single, so the reference is better than what it judges.
The numbers come from Python's own generator, so that they are the same with every PyTorch.

Shapes are odd on purpose (36 channels, heads of 12, 211 tokens padded to 256, rows of 17), and no
parameter starts at 0 or 1: every gradient takes part.

tiny.bin        model file, version 3 (fp32)
tiny_bf16.bin   the same model rounded to bf16, version 5
tiny_debug.bin  llm.c's debug state of tiny.bin: x, y, logits, loss, gradients
tiny_train.bin  ten AdamW steps from tiny.bin, little-endian:
                256 int32: [0] 20261130 [1] 1 [2] B [3] T [4] steps [5] number of parameters
                5 f64: beta1, beta2, eps, clip, weight decay (on matrices only)
                per step: f32 lr, int32 x(B,T), int32 y(B,T), f32 loss, f32 gradient norm
                f32 parameters after the last step, in the order of the model file
"""
import math
import os
import random
import struct

import torch

B, T, L, NH, C, V, VP, MAX_T = 3, 17, 3, 3, 36, 211, 256, 24
STEPS, BETA1, BETA2, EPS, CLIP, DECAY = 10, 0.9, 0.95, 1e-8, 1.4, 0.1
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fixtures")

# Name, shape, mean and deviation of the initial values, whether weight decay applies.
TENSORS = [
    ("wte", (VP, C), 0, 0.15, True), ("wpe", (MAX_T, C), 0, 0.1, True),
    ("ln1w", (L, C), 1, 0.3, False), ("ln1b", (L, C), 0, 0.2, False),
    ("qkvw", (L, 3 * C, C), 0, 0.2, True), ("qkvb", (L, 3 * C), 0, 0.2, False),
    ("attprojw", (L, C, C), 0, 0.1, True), ("attprojb", (L, C), 0, 0.1, False),
    ("ln2w", (L, C), 1, 0.3, False), ("ln2b", (L, C), 0, 0.2, False),
    ("fcw", (L, 4 * C, C), 0, 0.2, True), ("fcb", (L, 4 * C), 0, 0.2, False),
    ("fcprojw", (L, C, 4 * C), 0, 0.1, True), ("fcprojb", (L, C), 0, 0.1, False),
    ("lnfw", (C,), 1, 0.3, False), ("lnfb", (C,), 0, 0.2, False),
]


def initial_parameters(rng):
    params = {}
    for name, shape, mean, std, _ in TENSORS:
        p = torch.tensor([rng.gauss(mean, std) for _ in range(math.prod(shape))],
                         dtype=torch.float32)  # what the model file will hold, exactly
        p = p.double().view(shape)
        if name == "wte":
            p[V:] = 0
        params[name] = p.requires_grad_()
    return params


def layernorm(x, w, b):
    return torch.nn.functional.layer_norm(x, (C,), w, b, eps=1e-5)


def attention(x, w, b):
    q, k, v = (x @ w.T + b).split(C, dim=2)
    q, k, v = (t.view(B, T, NH, C // NH).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(C // NH)
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    return (scores.softmax(3) @ v).transpose(1, 2).reshape(B, T, C)


def forward(p, x, y):
    h = p["wte"][x] + p["wpe"][:T]
    for i in range(L):
        q = {name: p[name][i] for name, *_ in TENSORS[2:14]}
        a = attention(layernorm(h, q["ln1w"], q["ln1b"]), q["qkvw"], q["qkvb"])
        h = h + a @ q["attprojw"].T + q["attprojb"]
        f = layernorm(h, q["ln2w"], q["ln2b"]) @ q["fcw"].T + q["fcb"]
        g = torch.nn.functional.gelu(f, approximate="tanh")
        h = h + g @ q["fcprojw"].T + q["fcprojb"]
    logits = layernorm(h, p["lnfw"], p["lnfb"]) @ p["wte"][:V].T
    return logits, torch.nn.functional.cross_entropy(logits.view(-1, V), y.reshape(-1))


def floats(tensor):
    values = tensor.detach().float().flatten().tolist()
    return struct.pack(f"<{len(values)}f", *values)


def integers(tensor):
    values = tensor.flatten().tolist()
    return struct.pack(f"<{len(values)}i", *values)


def bf16(tensor):
    bits = tensor.detach().float().bfloat16().view(torch.int16).flatten().tolist()
    return struct.pack(f"<{len(bits)}h", *bits)


def write(name, header, *parts):
    with open(os.path.join(FOLDER, name), "wb") as f:
        f.write(struct.pack("<256i", *header, *[0] * (256 - len(header))))
        for part in parts:
            f.write(part)


def batch(rng):
    # Skewed towards small ids, so that tokens repeat within a row.
    rows = [[min(V - 1, int(rng.expovariate(1 / 40))) for _ in range(T + 1)] for _ in range(B)]
    tokens = torch.tensor(rows)
    return tokens[:, :-1], tokens[:, 1:]


def train(params, batches):
    """Ten steps; gives the records of the file. The schedule moves the rate in every step."""
    groups = [{"params": [params[t[0]] for t in TENSORS if t[4]], "weight_decay": DECAY},
              {"params": [params[t[0]] for t in TENSORS if not t[4]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(BETA1, BETA2), eps=EPS)
    records = []
    for step, (x, y) in enumerate(batches):
        lr = struct.unpack("<f", struct.pack("<f", 0.004 * (step + 1) / (1 + step * step / 8)))[0]
        optimizer.zero_grad()
        _, loss = forward(params, x, y)
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in params.values()))
        for p in params.values():
            p.grad *= min(1.0, CLIP / norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        print(f"step {step}: lr {lr:.5f} loss {loss.item():.6f} norm {norm:.4f}")
        records.append(struct.pack("<f", lr) + integers(x) + integers(y) +
                       struct.pack("<2f", loss.item(), norm))
    return records


def main():
    torch.set_num_threads(1)  # the order of sums, and so the last bit, is always the same
    rng = random.Random(1337)
    params = initial_parameters(rng)
    shape = [MAX_T, V, L, NH, C, VP]
    os.makedirs(FOLDER, exist_ok=True)
    write("tiny.bin", [20240326, 3, *shape], *[floats(p) for p in params.values()])
    write("tiny_bf16.bin", [20240326, 5, *shape], *[bf16(p) for p in params.values()])

    x, y = batch(rng)
    logits, loss = forward(params, x, y)
    loss.backward()
    write("tiny_debug.bin", [20240327, 2, B, T], integers(x), integers(y), floats(logits),
          floats(loss), *[floats(p.grad) for p in params.values()])

    records = train(params, [batch(rng) for _ in range(STEPS)])
    count = sum(p.numel() for p in params.values())
    write("tiny_train.bin", [20261130, 1, B, T, STEPS, count],
          struct.pack("<5d", BETA1, BETA2, EPS, CLIP, DECAY), *records,
          *[floats(p) for p in params.values()])


main()
