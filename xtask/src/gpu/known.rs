//! GPUs that plans are made for, by the name that `nvidia-smi` has for them. That is of whole GPUs:
//! `kernels/gpu/bench.py` asks the driver besides, whose device may be an instance of one.

/// Name for `--device`, words that the GPU's name has, and words that make it another GPU.
type KnownReason = (&'static str, &'static [&'static str], &'static [&'static str]);

/// As `Limits::find_limits` of `kvd-cuda` has them: clocks and bandwidth are of these forms alone.
const KNOWN: [KnownReason; 5] = [
    ("a100", &["A100", "80GB"], &["PCIE"]),
    ("rtx4090", &["RTX", "4090"], &["D", "LAPTOP"]),
    ("l40s", &["L40S"], &[]),
    ("h100", &["H100"], &["PCIE", "NVL"]),
    ("h200", &["H200"], &["NVL"]),
];

/// The name of a GPU for `--device`; none if no plan is made for it.
pub(super) fn find_kind(name: &str) -> Option<&'static str> {
    let name = name.to_uppercase();
    let words: Vec<&str> = name.split(|c: char| !c.is_alphanumeric()).collect();
    let has = |word: &&str| words.contains(word);
    let is = |(_, of, not): &&KnownReason| of.iter().all(has) && !not.iter().any(has);
    KNOWN.iter().find(is).map(|(kind, ..)| *kind)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Names that `nvidia-smi` has, and what `--device` calls those GPUs.
    pub(crate) const NAMES: [(&str, Option<&str>); 12] = [
        ("NVIDIA H100 80GB HBM3", Some("h100")),
        ("NVIDIA H200", Some("h200")),
        ("NVIDIA A100-SXM4-80GB", Some("a100")),
        ("NVIDIA GeForce RTX 4090", Some("rtx4090")),
        ("NVIDIA L40S", Some("l40s")),
        // Other memory: GB/s, or how much of it.
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA GH200 480GB", None),
        // Fewer multiprocessors.
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA B200", None),
    ];

    #[test]
    fn a_gpu_is_known_by_its_name_unless_it_is_of_another_form() {
        for (name, wanted) in NAMES {
            assert_eq!(find_kind(name), wanted, "{name}");
        }
    }
}
