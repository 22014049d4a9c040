//! The UUIDs of devices.

/// The UUID of a device: "simcuda", zeros, and the physical ordinal.
pub fn uuid(physical: u32) -> [u8; 16] {
    let mut uuid = *b"simcuda\0\0\0\0\0\0\0\0\0";
    uuid[15] = physical as u8;
    uuid
}

/// The UUID of a device as `nvidia-smi -L` prints it, which `CUDA_VISIBLE_DEVICES` accepts.
pub fn uuid_text(physical: u32) -> String {
    let hex: String = uuid(physical).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uuid_as_text() {
        assert_eq!(uuid_text(10), "GPU-73696d63-7564-6100-0000-00000000000a");
    }
}
