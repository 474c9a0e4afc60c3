//! Rings of regions.

use super::{ConfigError, RawConfig};
use kvd_shm::ring::RingPlace;
use std::time::Duration;

/// Limits of the rings of regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingConfig {
    /// Attends that one has under way.
    pub entries_max: u32,
    /// How long its thread looks for the next before it sleeps.
    pub spin: Duration,
}

/// A thread that looks for longer takes a core from those who have work for it.
const SPIN_MAX: Duration = Duration::from_millis(10);

impl RingConfig {
    pub(super) fn validate_raw(raw: &RawConfig) -> Result<Self, ConfigError> {
        let (entries_max, most) = (raw.limits.ring_entries_max, RingPlace::ENTRIES_MAX);
        if !entries_max.is_power_of_two() || entries_max > most {
            let reason = format!("{entries_max} is no power of two from 1 to {most}");
            return Err(ConfigError::new("limits.ring_entries_max", reason));
        }
        let spin = Duration::from_micros(raw.server.ring_spin_us);
        if spin > SPIN_MAX {
            let reason =
                format!("{} us are more than {} ms", spin.as_micros(), SPIN_MAX.as_millis());
            return Err(ConfigError::new("server.ring_spin_us", reason));
        }
        Ok(Self { entries_max, spin })
    }
}
