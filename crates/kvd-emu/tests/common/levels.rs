//! Codebooks whose entries are whole numbers of a unit, whatever they were fitted to.

use kvd_codec::Calibration;
use kvd_core::DType;
use serde_json::Value;

/// Bytes in front of a safetensors file's header: its length.
const LENGTH_BYTES: usize = 8;

/// The same calibration with every entry of its codebooks on the nearest of 255 levels.
pub(crate) fn on_levels(calibration: &Calibration) -> Calibration {
    let mut bytes = calibration.to_bytes();
    let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let data = LENGTH_BYTES + length;
    let header: Value = serde_json::from_slice(&bytes[LENGTH_BYTES..data]).unwrap();
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    for (name, tensor) in header.as_object().unwrap() {
        if !name.ends_with(".codebook") {
            continue;
        }
        let [start, end] = [0, 1].map(|end| data + number(&tensor["data_offsets"][end]));
        // Entries and channels are the last two axes: f16 values of one codebook.
        let book_bytes = 2 * number(&tensor["shape"][4]) * number(&tensor["shape"][5]);
        bytes[start..end].chunks_exact_mut(book_bytes).for_each(snap);
    }
    Calibration::from_bytes(&bytes).unwrap()
}

/// Moves the values of a codebook to levels of a unit that has four significant bits.
fn snap(book: &mut [u8]) {
    let mut values = vec![0f32; book.len() / 2];
    DType::F16.widen(book, &mut values);
    let largest = values.iter().fold(0f32, |most, value| most.max(value.abs()));
    let below = (1 << 20) - 1;
    let unit = f32::from_bits(((largest / 127.0).to_bits() + below) & !below);
    values.iter_mut().for_each(|value| *value = (*value / unit).round() * unit);
    DType::F16.narrow(&values, book);
}
