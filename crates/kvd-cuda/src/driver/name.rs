//! Which GPU is meant: its number, or its UUID, which is the same in every container.

use super::{Gpu, ProbeError};
use std::fmt;
use std::str::FromStr;

/// Characters of a UUID: `GPU-` and five groups of hexadecimal digits.
const UUID_LEN: usize = 40;

/// Major compute capability of the oldest GPU that the kernels are for.
const CAPABILITY_MIN: u32 = 8;

/// A GPU by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuName {
    /// As the driver numbers what this process may see.
    Ordinal(u32),
    /// As `nvidia-smi -L` prints it, `GPU-` and lower-case digits.
    Uuid(String),
}

/// A text that names no GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("neither a number nor GPU- and a UUID")]
pub struct BadGpuName;

impl FromStr for GpuName {
    type Err = BadGpuName;

    fn from_str(text: &str) -> Result<Self, BadGpuName> {
        if let Ok(ordinal) = text.parse() {
            return Ok(Self::Ordinal(ordinal));
        }
        let lower = text.to_ascii_lowercase();
        let digits = lower.strip_prefix("gpu-").ok_or(BadGpuName)?;
        let is_digit = |c: u8| c.is_ascii_hexdigit() || c == b'-';
        if text.len() != UUID_LEN || !digits.bytes().all(is_digit) {
            return Err(BadGpuName);
        }
        Ok(Self::Uuid(format!("GPU-{digits}")))
    }
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
    /// When none has it, or the kernels are not for it.
    pub fn find(&self, gpus: &[Gpu]) -> Result<Gpu, ProbeError> {
        let is_meant = |gpu: &&Gpu| match self {
            Self::Ordinal(ordinal) => gpu.ordinal == *ordinal,
            Self::Uuid(uuid) => gpu.uuid == *uuid,
        };
        let gpu = gpus.iter().find(is_meant);
        let none = || ProbeError::NoSuchDevice { name: self.clone(), count: gpus.len() };
        let gpu = gpu.ok_or_else(none)?;
        let [major, minor] = gpu.limits.compute;
        if major < CAPABILITY_MIN {
            let name = gpu.limits.name.clone();
            return Err(ProbeError::Capability { name, major, minor });
        }
        Ok(gpu.clone())
    }
}
