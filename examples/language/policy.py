"""A small text-conditioned policy: it reads the chat and the observation, predicts the supervised text and the action."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

PAD, END, UNKNOWN = 0, 1, 2


class Vocabulary:
    """Words as numbers; the same texts give the same numbers in every process."""

    def __init__(self, texts: Iterable[str]) -> None:
        words = sorted({word for text in texts for word in text.split()} | {"user:", "assistant:", "system:", "tool:"})
        self.numbers = {word: number for number, word in enumerate(words, UNKNOWN + 1)}
        self.words = {number: word for word, number in self.numbers.items()}

    def __len__(self) -> int:
        return len(self.numbers) + UNKNOWN + 1

    def encode(self, text: str) -> list[int]:
        """Word numbers of a text."""
        return [self.numbers.get(word, UNKNOWN) for word in text.split()]


def message_text(message: Mapping[str, Any]) -> str:
    """What the text model sees of a message: its text and, between tags, what it says aloud."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else " ".join(block["text"] for block in content if block.get("type") == "text")
    spoken = [call["function"]["arguments"]["text"] for call in message.get("tool_calls", ()) if call["function"]["name"] == "say"]
    return " ".join([text, *(f"<say> {words} </say>" for words in spoken)]).strip()


@dataclass(frozen=True)
class Chats:
    """A batch of flattened chats.

    Attributes:
        tokens: int64[B, T].
        supervised: bool[B, T], tokens that the text loss predicts.
        acts: bool[B], samples with the action loss: those with a turn on the low_level stream.
    """

    tokens: Tensor
    supervised: Tensor
    acts: Tensor


def flatten_chats(batch: Mapping[str, Any], vocabulary: Vocabulary) -> Chats:
    """``role: text`` of every turn in one line, with marks on the supervised turns."""
    lines: list[list[int]] = []
    marks: list[list[bool]] = []
    for messages, targets in zip(batch["messages"], batch["target_message_indices"], strict=True):
        tokens: list[int] = []
        supervised: list[bool] = []
        for position, message in enumerate(messages):
            head = vocabulary.encode(f"{message['role']}:")
            body = [*vocabulary.encode(message_text(message)), END]
            tokens += head + body
            supervised += [False] * len(head) + [position in targets] * len(body)
        lines.append(tokens)
        marks.append(supervised)
    width = max(map(len, lines))
    acts = torch.tensor(["low_level" in streams for streams in batch["message_streams"]])
    return Chats(
        torch.tensor([line + [PAD] * (width - len(line)) for line in lines]),
        torch.tensor([mark + [False] * (width - len(mark)) for mark in marks]),
        acts,
    )


class TextPolicy(nn.Module):
    """A recurrent net over the chat that starts from what is seen; its last state gives the action."""

    def __init__(self, vocabulary: int, picture: tuple[int, int], state: int, action: int, width: int = 96) -> None:
        super().__init__()
        height, width_px = picture
        # Averages over 8 by 8 pixels already say where the disc is.
        self.see = nn.Sequential(
            nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * (height // 8) * (width_px // 8), width), nn.ReLU(), nn.Linear(width, width)
        )
        self.feel = nn.Linear(state, width)
        self.embed = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.read = nn.GRU(width, width, batch_first=True)
        self.speak = nn.Linear(2 * width, vocabulary)
        self.act = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, action))

    def forward(self, picture: Tensor, state: Tensor, tokens: Tensor, *, blind: bool = False) -> tuple[Tensor, Tensor]:
        """Text logits [B, T, V] for the token after each, and the action [B, A].

        Args:
            picture: uint8[B, 3, H, W].
            state: float32[B, S].
            tokens: int64[B, T].
            blind: leaves the picture out, so that the action must come from state and text.
        """
        felt = torch.tanh(self.feel(state))
        seen = felt if blind else torch.tanh(self.see(picture.float() / 64 - 1.5) + self.feel(state))
        read, _ = self.read(self.embed(tokens), seen[None].contiguous())
        # Padding stands at the end: the state after the last word is the chat's.
        last = (tokens != PAD).sum(1) - 1
        heard = torch.cat([read, seen[:, None].expand(-1, read.shape[1], -1)], 2)
        return self.speak(heard), self.act(torch.cat([read[torch.arange(len(tokens)), last], felt], 1))


@dataclass(frozen=True)
class Losses:
    """Text and action loss of one batch; a part without samples is 0."""

    text: Tensor
    action: Tensor


def losses_of(model: nn.Module, batch: Mapping[str, Any], chats: Chats, camera: str) -> Losses:
    """Both losses of one batch.

    Text samples look at the picture. Action samples do not, which makes the text matter: it alone tells the side.
    """
    picture, state, action = (torch.as_tensor(batch[key]) for key in (camera, "observation.state", "action"))
    logits, _ = model(picture, state, chats.tokens)
    wanted = chats.supervised[:, 1:]
    text = F.cross_entropy(logits[:, :-1][wanted], chats.tokens[:, 1:][wanted]) if wanted.any() else logits.sum() * 0
    _, moved = model(picture, state, chats.tokens, blind=True)
    off = F.mse_loss(moved[chats.acts], action[chats.acts]) if chats.acts.any() else moved.sum() * 0
    return Losses(text, off)


class LossOf(nn.Module):
    """A policy whose ``forward`` is its two losses: ranks that train together exchange gradients once per forward call."""

    def __init__(self, policy: TextPolicy, camera: str) -> None:
        super().__init__()
        self.policy = policy
        self.camera = camera

    def forward(self, batch: Mapping[str, Any], chats: Chats) -> tuple[Tensor, Tensor]:
        """Text and action loss of one batch."""
        losses = losses_of(self.policy, batch, chats, self.camera)
        return losses.text, losses.action


def train_on(
    loss_of: nn.Module, batches: Iterable[Mapping[str, Any]], vocabulary: Vocabulary, optimiser: torch.optim.Optimizer
) -> list[tuple[float, float]]:
    """One optimiser step per batch; ``loss_of`` is a `LossOf`, wrapped or not. Returns text and action loss of each step."""
    history: list[tuple[float, float]] = []
    for batch in batches:
        text, action = loss_of(batch, flatten_chats(batch, vocabulary))
        optimiser.zero_grad(set_to_none=True)
        (text + action).backward()
        optimiser.step()
        history.append((float(text.detach()), float(action.detach())))
    return history


@torch.no_grad()
def action_error(
    model: nn.Module, batches: Sequence[Mapping[str, Any]], vocabulary: Vocabulary, camera: str, swap: Mapping[str, str]
) -> float:
    """Mean squared action error with every user text replaced as ``swap`` says; an empty mapping leaves the texts."""
    errors: list[float] = []
    for batch in batches:
        changed = [
            [{**message, "content": swap.get(message["content"], message["content"])} for message in chat] for chat in batch["messages"]
        ]
        chats = flatten_chats({**batch, "messages": changed}, vocabulary)
        if chats.acts.any():
            errors.append(float(losses_of(model, batch, chats, camera).action))
    return sum(errors) / len(errors)
