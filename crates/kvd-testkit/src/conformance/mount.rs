//! The suite as tests of a backend: one for each codec, so that a failure says which.

use super::transfer::check_transfer;
use super::{AttendCase, largest_error, list_cases, list_codecs, measure_errors};
use kvd_compute::Backend;
use kvd_core::RopePairing;

/// A backend that [`mount_conformance`](crate::mount_conformance) tests.
pub trait BackendUnderTest: Sized {
    /// How often each question of [`list_cases`] is asked, the index greater by 3 each time.
    const ROUNDS: usize = 1;

    /// A fresh backend, by whose index an emulated device may vary; none where this machine
    /// cannot run it.
    fn open_backend(index: usize) -> Option<Self>;

    /// The backend.
    fn backend_mut(&mut self) -> &mut dyn Backend;

    /// The largest error of an answer with a codec, in the units of [`measure_errors`].
    fn largest_error(codec: &str) -> f64 {
        largest_error(codec)
    }

    /// Ends the backend and checks what it leaves behind.
    fn close_backend(self, _codec: &str) {}
}

/// Asks a fresh backend one question.
///
/// # Panics
/// When the answer is further from f64 attention than the backend's bound.
pub fn check_case<B: BackendUnderTest>(index: usize, case: &AttendCase) {
    let Some(mut subject) = B::open_backend(index) else { return };
    let answer = measure_errors(subject.backend_mut(), case);
    let (off, lse) = answer.unwrap_or_else(|| panic!("{case:?} is not served"));
    let most = B::largest_error(case.text);
    assert!(off < most && lse < most, "{case:?}: outputs {off:.1e}, log-sum-exp {lse:.1e}");
    subject.close_backend(case.text);
}

/// Asks for attention over pages of a codec, with both pairings of its rotation.
///
/// # Panics
/// As [`check_case`].
pub fn check_codec<B: BackendUnderTest>(codec: &'static str) {
    let index = list_codecs().position(|listed| listed == codec).expect("a codec of the suite");
    for (offset, pairing) in [RopePairing::Half, RopePairing::Interleaved].into_iter().enumerate() {
        check_case::<B>(2 * index + offset, &AttendCase::new(codec, pairing));
    }
}

/// Asks everything that the plain question leaves out.
///
/// # Panics
/// As [`check_case`].
pub fn check_cases<B: BackendUnderTest>() {
    for round in 0..B::ROUNDS {
        for (index, case) in list_cases().enumerate() {
            check_case::<B>(index + 3 * round, &case);
        }
    }
}

/// Moves blocks of a codec from one fresh backend to another.
///
/// # Panics
/// When the second answers otherwise than the first.
pub fn check_codec_transfer<B: BackendUnderTest>(codec: &'static str) {
    let (Some(mut from), Some(mut to)) = (B::open_backend(0), B::open_backend(1)) else { return };
    check_transfer(from.backend_mut(), to.backend_mut(), codec);
    from.close_backend(codec);
    to.close_backend(codec);
}

/// Makes the suite tests of a [`BackendUnderTest`], in a module `conformance_suite`: one test for
/// each codec and property.
#[macro_export]
macro_rules! mount_conformance {
    ($backend:ty) => {
        $crate::mount_conformance! { @codecs $backend;
            raw: "raw",
            fp8: "fp8",
            kivi_4: "kivi-4",
            kivi_2: "kivi-2",
            kvcomp: "kvcomp",
            kvcomp_channel: "kvcomp-channel",
            vecinfer_4: "vecinfer-4",
            vecinfer_3: "vecinfer-3",
            vecinfer_2: "vecinfer-2",
            vecinfer_2_reg: "vecinfer-2-reg",
            vecinfer_1_5: "vecinfer-1.5",
            vecinfer_1_25: "vecinfer-1.25",
            cq_4: "cq-4",
            cq_2: "cq-2",
            vq_residual_4: "vq-residual-4",
            innerq_2: "innerq-2",
            polar_4_4: "polar-4+4",
            polar_4_2: "polar-4+2",
            turbo_4: "turbo-4",
            turbo_3: "turbo-3",
            oscar_2: "oscar-2",
            kvd_4: "kvd-4",
            kvd_3: "kvd-3",
            kvd_2: "kvd-2",
            kvd_1_5: "kvd-1.5",
            kvd_1: "kvd-1",
            kvd_2_fast: "kvd-2-fast",
            symmetric_and_hybrid_with_huffman: $crate::conformance::COMPOSED_CODECS[0],
            polar_with_huffman_and_rotated_lloyd: $crate::conformance::COMPOSED_CODECS[1],
            polar_groups_and_hybrid_blocks: $crate::conformance::COMPOSED_CODECS[2],
            one_bit_lloyd_and_symmetric_bytes: $crate::conformance::COMPOSED_CODECS[3],
        }
    };
    (@codecs $backend:ty; $($name:ident: $codec:expr),* $(,)?) => {
        mod conformance_suite {
            use super::*;

            #[test]
            fn every_codec_has_its_test() {
                let mut mounted = [$($codec),*];
                let mut listed: Vec<_> = $crate::conformance::list_codecs().collect();
                mounted.sort_unstable();
                listed.sort_unstable();
                assert_eq!(mounted[..], listed[..], "add it to mount_conformance!");
            }

            #[test]
            fn windows_caps_ranges_and_other_types_are_answered_as_asked() {
                $crate::conformance::check_cases::<$backend>();
            }

            mod attention_over_pages_is_attention_over_what_they_decode_to {
                use super::*;
                $(
                    #[test]
                    fn $name() {
                        $crate::conformance::check_codec::<$backend>($codec);
                    }
                )*
            }

            mod blocks_that_cross_to_another_backend_answer_as_before {
                use super::*;
                $(
                    #[test]
                    fn $name() {
                        $crate::conformance::check_codec_transfer::<$backend>($codec);
                    }
                )*
            }
        }
    };
}
