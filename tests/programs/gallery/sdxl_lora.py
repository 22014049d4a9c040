"""LoRA of Stable Diffusion XL's UNet at 1,024 x 1,024 with gradient checkpointing, in bfloat16."""

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig

BATCH, STEPS = 2, 3


def main():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        unet = UNet2DConditionModel(sample_size=128, block_out_channels=(320, 640, 1280),
                                    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                                    up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=(1, 2, 10),
                                    attention_head_dim=(5, 10, 20), cross_attention_dim=2048, use_linear_projection=True, addition_embed_type="text_time",
                                    addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816)
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
    unet.enable_gradient_checkpointing()
    unet.train()
    parameters = [one for one in unet.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    scheduler = DDPMScheduler()
    for step in range(STEPS):
        latents, text = torch.randn(BATCH, 4, 128, 128, device="cuda"), torch.randn(BATCH, 77, 2048, device="cuda")
        pooled, sizes = torch.randn(BATCH, 1280, device="cuda"), torch.zeros(BATCH, 6, device="cuda")
        noise, times = torch.randn_like(latents), torch.randint(1000, (BATCH, ), device="cuda")
        noisy = scheduler.add_noise(latents, noise, times)
        found = unet(noisy, times, text, added_cond_kwargs={"text_embeds": pooled, "time_ids": sizes}).sample
        loss = torch.nn.functional.mse_loss(found.float(), noise.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
