"""Trainers and training libraries, unmodified: in mixed precision, or by their own flags."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

PRELUDE = """
import logging, warnings
import numpy as np
import torch
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randint(0, 4, (64,))
pairs = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


seen, others = [], []
"""
"""`seen` is what is compared, `others` what has to be right in itself."""
EPILOGUE = """
import autoamp
torch.save([seen, others, autoamp.status()], "result.pt")
"""

LIGHTNING = """
import lightning as L
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()
        self.automatic_optimization = {automatic}

    def training_step(self, batch, index):
        x, y = batch
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y)
        seen.append(loss.detach())
        others.append(out.dtype)
        if self.automatic_optimization:
            self.log("train", loss)
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss / 2)
        if index % 2:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        seen.append(loss)
        self.log("val", loss)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


automatic = dict(accumulate_grad_batches=2, gradient_clip_val=0.5) if {automatic} else dict()
trainer = L.Trainer(
    precision="{precision}", accelerator="cpu", max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **automatic,
)
model = Lit()
trainer.fit(model, pairs, pairs)
"""

FABRIC = """
import lightning as L
fabric = L.Fabric(accelerator="cpu", precision="{precision}")
model = network()
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
for epoch in range(2):
    for index, (x, y) in enumerate(fabric.setup_dataloaders(pairs)):
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
        with fabric.no_backward_sync(model, enabled=not index % 2):
            fabric.backward(loss / 2)
        if index % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.detach())
        others.append(out.dtype)
"""

ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="{precision}")
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer, data = accelerator.prepare(model, optimizer, pairs)
for epoch in range(2):
    for x, y in data:
        with accelerator.accumulate(model):
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.detach())
        others.append(out.dtype)
"""

TRANSFORMERS = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.utils import logging as speech
speech.set_verbosity_error()
set_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
))
rows = [{{"input_ids": row, "labels": row}} for row in torch.randint(0, 64, (32, 12))]
arguments = TrainingArguments(
    output_dir="out", max_steps=8, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1,
    learning_rate=1e-3, bf16={bf16},
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
trainer.log = lambda logs, *_: seen.extend(v for k, v in logs.items() if k in ("loss", "eval_loss"))
trainer.train()
trainer.evaluate()
with torch.no_grad():
    others.append(model(rows[0]["input_ids"][None]).logits.dtype)
seen[:] = [torch.tensor(value) for value in seen]
"""

SKORCH = """
from skorch import NeuralNetClassifier
net = NeuralNetClassifier(
    network, criterion=nn.CrossEntropyLoss, max_epochs=3, batch_size=16, verbose=0,
    optimizer=torch.optim.{optimizer}, lr=0.05, train_split=None, iterator_train__shuffle=False,
)
net.fit(x.numpy(), y.numpy())
seen.extend(torch.tensor(row["train_loss"]) for row in net.history)
probabilities = net.predict_proba(x.numpy())
others.append(torch.from_numpy(probabilities).dtype)
seen.append(torch.from_numpy(probabilities))
"""

TORCHMETRICS = """
import torchmetrics
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
metrics = torchmetrics.MetricCollection([
    torchmetrics.Accuracy(task="multiclass", num_classes=4),
    torchmetrics.CalibrationError(task="multiclass", num_classes=4),
    torchmetrics.AUROC(task="multiclass", num_classes=4),
])
mean = torchmetrics.MeanMetric()
for epoch in range(4):
    for features, labels in pairs:
        out = model(features)
        loss = nn.functional.cross_entropy(out, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics.update(out.softmax(1), labels)
        mean.update(loss)
seen += [*metrics.compute().values(), mean.compute()]
others.append(mean.mean_value.dtype)
others.append(next(iter(metrics.values())).tp.dtype is torch.int64 and torch.float32)
"""

IGNITE = """
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import ModelCheckpoint
from ignite.metrics import Accuracy, Loss

model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loss = nn.CrossEntropyLoss()
trainer = create_supervised_trainer(
    model, optimizer, loss, output_transform=lambda x, y, out, value: (out, value.detach()),
    model_transform=lambda out: out, gradient_accumulation_steps=1,
)
evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy(), "loss": Loss(loss)})


@trainer.on(Events.ITERATION_COMPLETED)
def note(engine):
    out, value = engine.state.output
    seen.append(value)
    others.append(out.dtype)


@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    found = evaluator.run(pairs).metrics
    seen.append(torch.tensor(found["loss"]))


trainer.run(pairs, max_epochs=2)
"""

REINFORCE = """
import gymnasium


class Pointing(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.state = 0, self.np_random.normal(size=4).astype(np.float32)
        return self.state, {}

    def step(self, action):
        reward = float(action == self.state.argmax())
        self.steps, self.state = self.steps + 1, self.np_random.normal(size=4).astype(np.float32)
        return self.state, reward, self.steps == 16, False, {}


env = gymnasium.wrappers.NormalizeObservation(Pointing())
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
rng = np.random.default_rng(0)
returns = []
for episode in range(80):
    state, _ = env.reset(seed=episode)
    states, actions, rewards, done = [], [], [], False
    while not done:
        with torch.no_grad():
            probabilities = policy(torch.as_tensor(state, dtype=torch.float32)).softmax(0).numpy()
        assert probabilities.dtype == np.float32
        action = rng.choice(4, p=probabilities.astype(np.float64) / probabilities.sum(dtype=float))
        states.append(state)
        actions.append(action)
        state, reward, done, _, _ = env.step(action)
        rewards.append(reward)
    logits = policy(torch.as_tensor(np.array(states), dtype=torch.float32))
    others.append(logits.dtype)
    advantage = torch.tensor(rewards) - 0.25 if episode < 20 else torch.tensor(rewards) - np.mean(
        returns[-20:]
    )
    taken = torch.distributions.Categorical(logits=logits).log_prob(torch.tensor(actions))
    loss = -(taken * advantage).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    returns.append(np.mean(rewards))
assert np.mean(returns[-20:]) > 0.75, returns  # 0.25 by chance
"""

MESSAGES = """
class Passing(nn.Module):
    def __init__(self, width, reduce):
        super().__init__()
        self.message, self.update = nn.Linear(2 * width, width), nn.Linear(2 * width, width)
        self.reduce = reduce

    def forward(self, nodes, edges):
        source, target = edges
        messages = self.message(torch.cat([nodes[source], nodes[target]], 1)).relu()
        if self.reduce == "add":
            degree = torch.zeros(len(nodes)).index_add_(0, target, torch.ones(len(target)))
            gathered = torch.zeros_like(nodes).index_add_(0, target, messages)
            gathered = gathered / degree.clamp(min=1)[:, None]
        else:
            gathered = torch.zeros_like(nodes).scatter_reduce(
                0, target[:, None].expand_as(messages), messages, self.reduce, include_self=False
            )
        return nodes + self.update(torch.cat([nodes, gathered], 1))


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Passing(8, reduce) for reduce in ("add", "amax", "mean"))
        self.head = nn.Linear(8, 4)

    def forward(self, nodes, edges, graph):
        for layer in self.layers:
            nodes = layer(nodes, edges)
        pooled = nodes.new_zeros(2, 8).index_add(0, graph, nodes)
        return self.head(nodes), self.head(pooled / torch.bincount(graph)[:, None])


model = Graph()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
edges, graph = torch.randint(0, 64, (2, 4096)), torch.arange(64) // 32
edges[1, :3000] = 7  # a hub: more neighbours than float16 can count
for step in range(8):
    each, both = model(x, edges, graph)
    loss = nn.functional.cross_entropy(each, y) + both.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seen.append(loss.detach())
    others.append(each.dtype)
"""


def lightning(precision: str, automatic: bool = True) -> str:
    return LIGHTNING.format(precision=precision, automatic=automatic)


JOIN = {
    "lightning": (lightning("32-true"), 8),
    "lightning, manual optimization": (lightning("32-true", automatic=False), 8),
    "lightning fabric": (FABRIC.format(precision="32-true"), 8),
    "accelerate": (ACCELERATE.format(precision="no"), 8),
    "transformers": (TRANSFORMERS.format(bf16=False), 8),
    "skorch": (SKORCH.format(optimizer="SGD"), 12),
    "torchmetrics": (TORCHMETRICS, 32),
    "ignite": (IGNITE, 16),
    "gymnasium": (REINFORCE, 80),
    "message passing": (MESSAGES, 8),
}
"""What runs in mixed precision, and how many steps it takes."""

SCRIPT, BY = "the script has its own torch.autocast", "{} has its own mixed precision"
OWN_FLAGS = {
    "lightning, bf16-mixed": (lightning("bf16-mixed"), SCRIPT),
    "lightning, 16-mixed": (lightning("16-mixed"), SCRIPT),
    "lightning, bf16-mixed, manual": (lightning("bf16-mixed", automatic=False), SCRIPT),
    "lightning fabric, bf16-mixed": (FABRIC.format(precision="bf16-mixed"), BY.format("lightning")),
    "accelerate, bf16": (ACCELERATE.format(precision="bf16"), BY.format("accelerate")),
    "transformers, bf16": (TRANSFORMERS.format(bf16=True), BY.format("accelerate")),
}
"""Whose own flags win, and the reason that autoamp names."""

MODES = ("float16", "bfloat16")
NEIGHBOURS = (
    "lightning",
    "transformers",
    "accelerate",
    "skorch",
    "torchmetrics",
    "ignite",
    "gymnasium",
)
INSTALLED = [name for name in NEIGHBOURS if importlib.util.find_spec(name)]


def needs(name: str) -> Any:
    """`name` as a parameter, skipped where its library is not installed (it is a test extra)."""
    library = name.split(",")[0].split()[0]
    missing = library in NEIGHBOURS and library not in INSTALLED
    reason = f"{library} is not installed here: pip install '.[test]' brings it"
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=reason))


@pytest.fixture(scope="module")
def found(in_children: Any) -> dict[str, Any]:
    """By mode ("" is without autoamp): what became of each script."""
    cases = {**JOIN, **OWN_FLAGS}
    scripts = {name: PRELUDE + script + EPILOGUE for name, (script, _) in cases.items()}
    imports = ", ".join(["torch._dynamo", *INSTALLED])
    everywhere = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    on = {
        dtype: {"AUTO_MIXED_PRECISION": "1", "AUTO_MIXED_PRECISION_DTYPE": dtype} for dtype in MODES
    }
    return {
        mode: in_children(scripts, imports, **everywhere, **on.get(mode, {}))
        for mode in ("", *MODES)
    }


@pytest.mark.parametrize("dtype", MODES)
@pytest.mark.parametrize("name", [needs(name) for name in JOIN])
def test_it_trains_in_mixed_precision(found: Any, name: str, dtype: str) -> None:
    """Near what float32 gives and not the same; float32 is what it sees, and every step counts."""
    import torch

    plain, mixed = found[""][name], found[dtype][name]
    assert plain.code == mixed.code == 0, (plain.stderr, mixed.stderr)
    assert plain.stdout == mixed.stdout
    expected, _, _ = plain.result
    seen, dtypes, status = mixed.result
    assert set(dtypes) == {torch.float32}
    assert status["devices"]["cpu"]["dtype"] == dtype
    assert status["steps"] == {"taken": JOIN[name][1], "skipped": 0}
    assert status["demotions"] == []
    if seen:
        torch.testing.assert_close(seen, expected, rtol=2e-2, atol=1e-2)
        assert not all(map(torch.equal, seen, expected))


@pytest.mark.parametrize("dtype", MODES)
@pytest.mark.parametrize("name", [needs(name) for name in OWN_FLAGS])
def test_its_own_flags_win(found: Any, name: str, dtype: str) -> None:
    """To the bit what it gives without autoamp, and one line says so."""
    import torch

    plain, mixed = found[""][name], found[dtype][name]
    assert plain.code == mixed.code == 0, (plain.stderr, mixed.stderr)
    torch.testing.assert_close(mixed.result[0], plain.result[0], rtol=0.0, atol=0.0)
    assert mixed.result[1] == plain.result[1]
    assert f"autoamp 0.1.0 stands aside: {OWN_FLAGS[name][1]}" in mixed.said
    assert mixed.result[2]["loss_scale"]["mode"] == "off"
