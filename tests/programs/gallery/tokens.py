"""A tokenizer of words, made without a download, for trainers that need one."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer(size):
    """A tokenizer with `size` tokens, of which all but the special ones are words such as `w17`."""
    special = ["<pad>", "<eos>", "<unk>"]
    words = {word: number for number, word in enumerate([*special, *(f"w{number}" for number in range(size - len(special)))])}
    own = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
