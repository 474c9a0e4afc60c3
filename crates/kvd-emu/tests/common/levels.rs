//! Calibrations with other tensors than a fit leaves: codebooks off whole levels, and on them.

use kvd_codec::Calibration;
use serde_json::Value;

/// Bytes in front of a safetensors file's header: its length.
const LENGTH_BYTES: usize = 8;

/// The calibration with each tensor's bytes changed by `change`, which gets its name without its
/// part, and its shape.
pub(crate) fn changed(
    calibration: &Calibration,
    change: impl Fn(&str, &[usize], &mut [u8]),
) -> Calibration {
    let mut bytes = calibration.to_bytes();
    let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let data = LENGTH_BYTES + length;
    let header: Value = serde_json::from_slice(&bytes[LENGTH_BYTES..data]).unwrap();
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    for (name, tensor) in header.as_object().unwrap() {
        let Some((_, kind)) = name.split_once('.').filter(|_| name != "__metadata__") else {
            continue;
        };
        let [start, end] = [0, 1].map(|end| data + number(&tensor["data_offsets"][end]));
        let shape: Vec<usize> = tensor["shape"].as_array().unwrap().iter().map(number).collect();
        change(kind, &shape, &mut bytes[start..end]);
    }
    Calibration::from_bytes(&bytes).unwrap()
}

/// The calibration with the entries of its codebooks moved off their levels.
pub(crate) fn off_levels(calibration: &Calibration) -> Calibration {
    changed(calibration, |kind, _, bytes| {
        if kind == "codebook" {
            // The last bit of each f16, which no level of a unit of few bits has for all of them.
            bytes.iter_mut().step_by(size_of::<u16>()).for_each(|byte| *byte ^= 1);
        }
    })
}
