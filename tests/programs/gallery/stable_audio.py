"""Stable Audio Open: its diffusion transformer with guidance, then the decoder of 47 seconds of stereo audio."""

import torch
from diffusers import AutoencoderOobleck, StableAudioDiTModel

BATCH, STEPS = 1, 3


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda"):
        transformer, decoder = StableAudioDiTModel().eval(), AutoencoderOobleck().eval()
        latents, text, seconds = torch.randn(BATCH, 64, 1024), torch.randn(2 * BATCH, 130, 768), torch.randn(2 * BATCH, 1, 1536)
    with torch.no_grad():
        for step in range(STEPS):
            time = torch.full((2 * BATCH, ), 1 - step / STEPS, device="cuda")
            found = transformer(torch.cat([latents] * 2), time, text, seconds, return_dict=False)[0]
            without, with_text = found.chunk(2)
            latents = latents - (without + 7 * (with_text - without)) / STEPS
        audio = decoder.decode(latents).sample
    print("audio", tuple(audio.shape))


if __name__ == "__main__":
    main()
