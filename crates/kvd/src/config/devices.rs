//! Devices of `device.device`: a processor, a GPU, or several between commas.

use super::{ConfigError, DeviceChoice};

/// Devices of one daemon.
const DEVICES_MAX: usize = 16;

/// Devices between commas.
pub(super) fn parse_devices(text: &str) -> Result<Vec<DeviceChoice>, ConfigError> {
    let devices: Vec<_> =
        text.split(',').map(|text| parse_device(text.trim())).collect::<Result<_, _>>()?;
    let is_named_twice = |(index, choice): (usize, &DeviceChoice)| {
        matches!(choice, DeviceChoice::Cuda(_)) && devices[..index].contains(choice)
    };
    let reason = if devices.len() > 1 && devices.contains(&DeviceChoice::Auto) {
        "auto stands alone"
    } else if devices.len() > DEVICES_MAX {
        "a daemon has at most 16 devices"
    } else if devices.iter().enumerate().any(is_named_twice) {
        "a GPU is named twice"
    } else {
        return Ok(devices);
    };
    Err(ConfigError::new("device.device", format!("{text:?}: {reason}")))
}

fn parse_device(text: &str) -> Result<DeviceChoice, ConfigError> {
    let gpu = text.strip_prefix("cuda:").map(str::parse);
    match (text, gpu) {
        ("cpu", _) => Ok(DeviceChoice::Cpu),
        ("auto", _) => Ok(DeviceChoice::Auto),
        (_, Some(Ok(gpu))) => Ok(DeviceChoice::Cuda(gpu)),
        _ => {
            let reason = format!(
                "{text:?} is not cpu, auto, cuda:N (N from 0) or cuda:GPU-<uuid> (or MIG-<uuid>) \
                 as nvidia-smi -L prints it"
            );
            Err(ConfigError::new("device.device", reason))
        }
    }
}
