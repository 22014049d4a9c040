"""Stable Diffusion XL at 1,024 x 1,024: steps of the denoising loop with guidance, then the VAE's decoder."""

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel

BATCH, STEPS = 4, 3


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda"):
        unet = UNet2DConditionModel(sample_size=128, block_out_channels=(320, 640, 1280),
                                    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                                    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=(1, 2, 10),
                                    attention_head_dim=(5, 10, 20), cross_attention_dim=2048, use_linear_projection=True, addition_embed_type="text_time",
                                    addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816)
        vae = AutoencoderKL(down_block_types=("DownEncoderBlock2D", ) * 4, up_block_types=("UpDecoderBlock2D", ) * 4,
                            block_out_channels=(128, 256, 512, 512), layers_per_block=2, sample_size=1024)
        text, pooled = torch.randn(2 * BATCH, 77, 2048), torch.randn(2 * BATCH, 1280)
        sizes = torch.tensor([[1024, 1024, 0, 0, 1024, 1024]] * 2 * BATCH, dtype=torch.float16)
        latents = torch.randn(BATCH, 4, 128, 128)
    scheduler = EulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    with torch.no_grad():
        for time in scheduler.timesteps:
            noise = unet(torch.cat([latents] * 2), time.to("cuda"), text, added_cond_kwargs={"text_embeds": pooled, "time_ids": sizes}).sample
            without, with_text = noise.chunk(2)
            latents = latents + 0.1 * (without + 5 * (with_text - without))
        images = vae.decode(latents / 0.13).sample
    print("images", tuple(images.shape))


if __name__ == "__main__":
    main()
