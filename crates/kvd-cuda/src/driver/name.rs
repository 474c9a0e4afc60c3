//! Which GPU is meant: its number, or its UUID, which is the same in every container.

use super::{GpuDevice, ProbeError};
use std::fmt;
use std::str::FromStr;

/// Characters of a UUID: `GPU-` and five groups of hexadecimal digits.
const UUID_LEN: usize = 40;
/// Prefixes of UUIDs: of a GPU, and of an instance of one that is divided (MIG).
const PREFIXES: [&str; 2] = ["GPU-", "MIG-"];

/// Major compute capability of the oldest GPU that the kernels are for.
const CAPABILITY_MIN: u32 = 8;

/// A GPU by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuName {
    /// As the driver numbers what this process may see.
    Ordinal(u32),
    /// As `nvidia-smi -L` prints it, `GPU-` or `MIG-` and lower-case digits.
    Uuid(String),
}

/// A text that names no GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("neither a number nor GPU- or MIG- and a UUID")]
pub struct BadGpuName;

impl FromStr for GpuName {
    type Err = BadGpuName;

    fn from_str(text: &str) -> Result<Self, BadGpuName> {
        if let Ok(ordinal) = text.parse() {
            return Ok(Self::Ordinal(ordinal));
        }
        let (prefix, digits) = split_uuid(text).ok_or(BadGpuName)?;
        let is_digit = |c: u8| c.is_ascii_hexdigit() || c == b'-';
        if text.len() != UUID_LEN || !digits.bytes().all(is_digit) {
            return Err(BadGpuName);
        }
        Ok(Self::Uuid(format!("{prefix}{}", digits.to_ascii_lowercase())))
    }
}

/// A UUID's prefix and digits.
fn split_uuid(uuid: &str) -> Option<(&'static str, &str)> {
    PREFIXES.into_iter().find_map(|prefix| {
        let (start, digits) = uuid.split_at_checked(prefix.len())?;
        start.eq_ignore_ascii_case(prefix).then_some((prefix, digits))
    })
}

/// Whether two UUIDs are of one GPU. The driver gives the digits alone, so that those of an
/// instance of a divided GPU (`MIG-…`) are not told from a GPU's.
#[must_use]
pub fn is_same_gpu(a: &str, b: &str) -> bool {
    let digits = |uuid| split_uuid(uuid).map_or(uuid, |(_, digits)| digits);
    digits(a).eq_ignore_ascii_case(digits(b))
}

impl fmt::Display for GpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ordinal(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Uuid(uuid) => write!(f, "cuda:{uuid}"),
        }
    }
}

impl GpuName {
    /// The GPU of that name.
    ///
    /// # Errors
    /// When none has it, the driver does not describe it, or the kernels are not for it.
    pub fn find_gpu(
        &self,
        gpus: &[Result<GpuDevice, ProbeError>],
    ) -> Result<GpuDevice, ProbeError> {
        let none = || ProbeError::NoSuchDevice { name: self.clone(), count: gpus.len() };
        let gpu = match self {
            Self::Ordinal(ordinal) => gpus.get(*ordinal as usize).ok_or_else(none)?.as_ref(),
            Self::Uuid(uuid) => {
                let is_meant = |gpu: &&GpuDevice| is_same_gpu(&gpu.uuid, uuid);
                match gpus.iter().flatten().find(is_meant) {
                    Some(gpu) => Ok(gpu),
                    // It may be one that the driver does not describe.
                    None => Err(gpus.iter().find_map(|gpu| gpu.as_ref().err()).ok_or_else(none)?),
                }
            }
        };
        let gpu = gpu.map_err(Clone::clone)?;
        let [major, minor] = gpu.limits.compute;
        if major < CAPABILITY_MIN {
            let name = gpu.limits.name.clone();
            return Err(ProbeError::Capability { name, major, minor });
        }
        Ok(gpu.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_the_driver_does_not_describe_hides_no_other() {
        let lost =
            || ProbeError::Driver { call: "cuDeviceGetName", code: 999, name: "LOST".to_owned() };
        let gpu = |ordinal| {
            let uuid = format!("GPU-0000000{ordinal}-0405-0607-0809-0a0b0c0d0e0f");
            GpuDevice { ordinal, uuid, limits: crate::GpuLimits::h100() }
        };
        let gpus = [Err(lost()), Ok(gpu(1))];
        assert_eq!(GpuName::Ordinal(0).find_gpu(&gpus), Err(lost()));
        assert_eq!(GpuName::Ordinal(1).find_gpu(&gpus), Ok(gpu(1)));
        assert_eq!(GpuName::Uuid(gpu(1).uuid).find_gpu(&gpus), Ok(gpu(1)));
        // A UUID that none has may be its own.
        assert_eq!(GpuName::Uuid(gpu(2).uuid).find_gpu(&gpus), Err(lost()));
        for name in [GpuName::Ordinal(2), GpuName::Uuid(gpu(2).uuid)] {
            let none = name.find_gpu(&[Ok(gpu(0)), Ok(gpu(1))]).unwrap_err();
            assert_eq!(none, ProbeError::NoSuchDevice { name, count: 2 });
        }
    }

    #[test]
    fn instances_of_a_divided_gpu_are_named_as_nvidia_smi_prints_them() {
        let digits = "00010203-0405-0607-0809-0a0b0c0d0e0f";
        let name: GpuName = format!("mig-{}", digits.to_uppercase()).parse().unwrap();
        assert_eq!(name, GpuName::Uuid(format!("MIG-{digits}")));
        let uuid = format!("GPU-{digits}");
        let limits = crate::GpuLimits::h100();
        let gpus = [Ok(GpuDevice { ordinal: 0, uuid: uuid.clone(), limits })];
        assert_eq!(name.find_gpu(&gpus).unwrap().ordinal, 0);
        assert!(is_same_gpu(&uuid, &format!("MIG-{digits}")) && is_same_gpu(digits, &uuid));
        assert!(!is_same_gpu(&uuid, "GPU-10010203-0405-0607-0809-0a0b0c0d0e0f"));
        for text in ["MIG-1", digits, "TPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "ü"] {
            assert_eq!(text.parse::<GpuName>(), Err(BadGpuName), "{text}");
        }
    }
}
