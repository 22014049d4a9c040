"""FLUX.1's transformer (12 billion parameters) in bfloat16: steps of the denoising loop at 1,024 x 1,024."""

import torch
from diffusers import FluxTransformer2DModel

BATCH, TOKENS, TEXT, STEPS = 1, 4096, 512, 3


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = FluxTransformer2DModel(guidance_embeds=True).eval()
        latents, text, pooled = torch.randn(BATCH, TOKENS, 64), torch.randn(BATCH, TEXT, 4096), torch.randn(BATCH, 768)
        places, text_places = torch.zeros(TOKENS, 3), torch.zeros(TEXT, 3)
        guidance = torch.full((BATCH, ), 3.5)
    with torch.no_grad():
        for step in range(STEPS):
            time = torch.full((BATCH, ), 1 - step / STEPS, device="cuda")
            velocity = model(latents, text, pooled, time, places, text_places, guidance, return_dict=False)[0]
            latents = latents - velocity / STEPS
    print("latents", tuple(latents.shape))


if __name__ == "__main__":
    main()
