//! Whether kernels that write pages fuse a product with a sum: pages are the reference encoder's
//! byte for byte because each product and each sum is rounded on its own. Divisions and roots are
//! made of fused products, and rounded as IEEE says.

use super::listing::{Frame, Instruction, Kernel, Listing};
use anyhow::{Result, ensure};

/// What a line of `device.cuh` calls where fused products are meant.
const MEANT: [&str; 5] = ["__fdiv_rn(", "__frcp_rn(", "__fsqrt_rn(", "__ddiv_rn(", "__dsqrt_rn("];
/// Products and sums in one, of one number, of two halves, of doubles.
const FUSED: [&str; 3] = ["FFMA", "HFMA2", "DFMA"];
/// A sum of two halves with nothing: how some constants come into a register.
const OF_NOTHING: [&str; 2] = ["-RZ", "RZ"];

/// Fused products of a listing: those of divisions and roots, or why there are others. `line` gives
/// the text of a place in the sources.
pub(super) fn check(listing: &Listing, line: impl Fn(Frame) -> String) -> Result<usize> {
    let (mut meant, mut others) = (0, Vec::new());
    for kernel in &listing.kernels {
        for instruction in fused(kernel) {
            let place = listing.chains[instruction.chain].first().copied();
            let text = place.map(&line).unwrap_or_default();
            if MEANT.iter().any(|call| text.contains(call)) {
                meant += 1;
            } else {
                let number = place.map_or(0, |place| place.line);
                let (name, opcode) = (&kernel.name, &instruction.opcode);
                others.push(format!("{name}: {opcode} of line {number}, {:?}", text.trim()));
            }
        }
    }
    others.dedup();
    ensure!(others.is_empty(), "products are fused with sums:\n{}", others.join("\n"));
    // Every kernel divides: none at all would be a listing that was not read.
    ensure!(meant > 0, "no fused product at all, not of a division either");
    Ok(meant)
}

/// A kernel's own: what the compiler's subroutines for rare numbers have is theirs.
fn fused(kernel: &Kernel) -> impl Iterator<Item = &Instruction> {
    let end = kernel.subroutines_at.unwrap_or(kernel.instructions.len());
    kernel.instructions[..end].iter().filter(|instruction| {
        let operands: Vec<&str> = instruction.operands.split(", ").collect();
        FUSED.contains(&instruction.operation()) && operands.get(1..3) != Some(&OF_NOTHING)
    })
}

#[cfg(test)]
mod tests {
    use super::super::listing;
    use super::*;

    const TEXT: &str = "\
\t.section\t.text.kvd_store_a,\"ax\",@progbits
kvd_store_a:
\t//## File \"/k/device.cuh\", line 1 inlined at \"/k/a.cu\", line 7
        /*0000*/                   FFMA R3, R0, R3, R4 ;
        /*0010*/                   DFMA R6, R6, R8, R10 ;
\t//## File \"/k/a.cu\", line 7
        /*0020*/                   HFMA2.MMA R54, -RZ, RZ, 0, 0 ;
        /*0030*/                   FMUL R1, R2, R3 ;
$__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath:
        /*0040*/                   FFMA R3, R0, R3, R4 ;
";

    fn line(frame: Frame) -> String {
        let lines = ["float over(float a, float b) { return __fdiv_rn(a, b); }"];
        lines.get(frame.line - 1).unwrap_or(&"sum += a * b;").to_string()
    }

    #[test]
    fn divisions_may_fuse_products_and_nothing_else() {
        assert_eq!(check(&listing::parse(TEXT), line).unwrap(), 2);
        for fused in ["FFMA R1, R2, R3, R4", "HFMA2 R1, R2, R3, R4", "DFMA R2, R4, R6, -R8"] {
            let text = TEXT.replace("FMUL R1, R2, R3", fused);
            let error = check(&listing::parse(&text), line).unwrap_err().to_string();
            assert!(error.contains("kvd_store_a: ") && error.contains("sum += a * b"), "{error}");
        }
    }

    #[test]
    fn a_listing_without_any_is_none() {
        assert!(check(&Listing::default(), line).is_err());
    }
}
