//! Fixed-width codes: little-endian bit fields, each row starting on a byte.

/// Bytes of one row of `count` codes of `bits` bits.
pub(crate) fn row_bytes(count: usize, bits: u32) -> usize {
    (count * bits as usize).div_ceil(8)
}

/// Appends rows of `per_row` codes.
pub(crate) fn pack_rows(symbols: &[u16], per_row: usize, bits: u32, out: &mut Vec<u8>) {
    if bits == 8 {
        out.extend(symbols.iter().map(|symbol| *symbol as u8));
        return;
    }
    for row in symbols.chunks_exact(per_row) {
        let (mut held, mut filled) = (0u64, 0u32);
        for symbol in row {
            held |= u64::from(*symbol) << filled;
            filled += bits;
            while filled >= 8 {
                out.push(held as u8);
                held >>= 8;
                filled -= 8;
            }
        }
        if filled > 0 {
            out.push(held as u8);
        }
    }
}

/// Reads `symbols.len()` codes of `bits` bits (at most 16) from one row's bytes; bytes that are
/// missing read as zero.
pub(crate) fn unpack_row(row: &[u8], bits: u32, symbols: &mut [u16]) {
    if bits == 8 {
        for (symbol, byte) in symbols.iter_mut().zip(row) {
            *symbol = u16::from(*byte);
        }
        return;
    }
    let mask = (1u64 << bits) - 1;
    let mut bytes = row.iter();
    let (mut held, mut filled) = (0u64, 0u32);
    for symbol in symbols {
        while filled < bits {
            held |= u64::from(bytes.next().copied().unwrap_or(0)) << filled;
            filled += 8;
        }
        *symbol = (held & mask) as u16;
        held >>= bits;
        filled -= bits;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_round_trips() {
        for bits in 1..=16u32 {
            for per_row in [1usize, 7, 32, 33] {
                let mask = (1u32 << bits) - 1;
                let symbols: Vec<u16> = (0..3 * per_row as u32)
                    .map(|i| (((i * 2_654_435) >> 7) & mask) as u16)
                    .collect();
                let mut bytes = Vec::new();
                pack_rows(&symbols, per_row, bits, &mut bytes);
                let row = row_bytes(per_row, bits);
                assert_eq!(bytes.len(), 3 * row);
                let mut back = vec![0; per_row];
                for (i, wanted) in symbols.chunks(per_row).enumerate() {
                    unpack_row(&bytes[i * row..][..row], bits, &mut back);
                    assert_eq!(back, wanted, "{bits} bits");
                }
            }
        }
    }
}
