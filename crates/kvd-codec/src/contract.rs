//! The accuracy contract: what a codec promises about the error of a page, and what a page that
//! breaks the promise falls back to.
//!
//! A codec text may declare a bound per side (`k.bound=0.2`): the largest relative
//! root-mean-square error of a page's rows. Keys with `qpca` are measured as coefficients, that is
//! by what their errors do to the scores of queries like those of the calibration, against how
//! scores differ: in the rows themselves large errors may lie where no query looks.
//! [`ModelCodec::encode_block_checked`] decodes each page again; one that is over the bound is
//! encoded with the next safer rung of a fixed ladder (4-bit codes, then FP8, then raw floats) that
//! keeps it. Rungs have no transforms and no
//! calibration, so that they hold whatever the data does.

use crate::encode::{self, PagePlan};
use crate::model::EncodedBlock;
use crate::side::HeadQuantizer;
use crate::side::bind::HeadPlace;
use crate::{BlockRows, CodecError, HeadSide, ModelCodec, PageReader, Space, resolve};
use kvd_core::{Geometry, LayerIndex, Side};

/// Below the codec itself and above raw floats, most compact first.
const RUNGS: [&str; 2] = ["uniform(b=4,g=32,axis=token)", "fp8"];

/// What [`ModelCodec::encode_block_checked`] found, by side.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CheckedBlock {
    /// Squared error and squared norm of what was stored, all heads.
    pub sums: [(f64, f64); 2],
    /// Pages over the declared bound, stored with a safer rung.
    pub over_bound: [u32; 2],
}

/// Squared error and squared norm of a page.
type Sums = (f64, f64);

/// The rungs of each side, for every head of it.
#[derive(Clone, Debug)]
pub(crate) struct Ladder {
    sides: [Vec<HeadSide>; 2],
}

impl Ladder {
    pub(crate) fn new(geometry: &Geometry) -> Result<Self, CodecError> {
        let side = |side: Side| -> Result<Vec<HeadSide>, CodecError> {
            let bind = |rung: &&str| {
                let spec = resolve(&format!("k={rung}; v={rung}")).expect("the rungs parse");
                let mut heads = HeadSide::bind(geometry, &spec, None, (LayerIndex(0), side))?;
                let mut head = heads.swap_remove(0);
                head.rung = true;
                Ok(head)
            };
            RUNGS.iter().map(bind).collect()
        };
        Ok(Self { sides: [side(Side::Key)?, side(Side::Value)?] })
    }

    /// The rung whose pages have that quantizer id.
    pub(crate) fn rung(&self, side: Side, quantizer: u8) -> Option<&HeadSide> {
        self.sides[side.index()].iter().find(|rung| rung.quantizer_id() == quantizer)
    }
}

impl ModelCodec {
    /// As [`ModelCodec::encode_block`], and measures every page by decoding it; pages over the
    /// bound that the codec declares for their side are stored with a safer rung.
    ///
    /// # Errors
    /// As [`ModelCodec::encode_block`].
    pub fn encode_block_checked(
        &self,
        layer: LayerIndex,
        block: &BlockRows<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(EncodedBlock, CheckedBlock), CodecError> {
        let mut checked = CheckedBlock::default();
        let encoded = self.encode_pages(layer, block, out, &mut |plan, scratch, out| {
            let start = out.len();
            let mut page = encode::page(plan, scratch, out);
            let mut sums = self.page_error(plan, &out[start..]);
            let HeadPlace { side, .. } = plan.place;
            let bound = self.spec().bounds[side.index()];
            if bound.is_some_and(|bound| is_over(sums, bound)) {
                checked.over_bound[side.index()] += 1;
                for rung in self.safer(plan.side, side) {
                    out.truncate(start);
                    page = encode::page(&PagePlan { side: &rung, ..*plan }, scratch, out);
                    sums = self.page_error(plan, &out[start..]);
                    if !bound.is_some_and(|bound| is_over(sums, bound)) {
                        break;
                    }
                }
            }
            let total = &mut checked.sums[side.index()];
            (total.0, total.1) = (total.0 + sums.0, total.1 + sums.1);
            page
        })?;
        Ok((encoded, checked))
    }

    /// The rungs above a head's own side, last the stored precision.
    fn safer(&self, head: &HeadSide, side: Side) -> impl Iterator<Item = HeadSide> {
        let tag = head.tag;
        let raw = HeadSide {
            dim: head.dim,
            steps: Vec::new(),
            gain: None,
            query_metric: false,
            quantizer: HeadQuantizer::Float(self.geometry().dtype),
            variant: head.variant,
            trained_tables: false,
            trained_run: head.trained_run,
            rung: true,
            tag,
        };
        let rungs = self.ladder.sides[side.index()].iter();
        rungs.map(move |rung| HeadSide { tag, ..rung.clone() }).chain(std::iter::once(raw))
    }

    /// Error of the page at the end of a block that is being written.
    fn page_error(&self, plan: &PagePlan<'_>, page: &[u8]) -> Sums {
        let HeadPlace { layer, side, head } = plan.place;
        let dim = plan.side.dim();
        let reader = PageReader::open(self, layer, side, head, page).expect("it was just written");
        let mut decoded = vec![0f32; plan.rows.len()];
        reader.decode_rows(0, plan.rows.len() / dim, &mut decoded).expect("it was just written");
        let of_head = self.head(layer, side, head);
        if of_head.query_metric {
            let mut original = plan.rows.to_vec();
            of_head.forward(&mut original);
            if reader.space() == Space::Raw {
                of_head.forward(&mut decoded);
            }
            return row_error(&decoded, &original);
        }
        if reader.space() == Space::Coefficient {
            let mut value = vec![0f32; dim];
            for row in decoded.chunks_exact_mut(dim) {
                of_head.inverse(row, &mut value);
                row.copy_from_slice(&value);
            }
        }
        row_error(&decoded, plan.rows)
    }
}

fn row_error(decoded: &[f32], original: &[f32]) -> Sums {
    let square = |x: f64| x * x;
    let mut sums = (0.0, 0.0);
    for (a, b) in decoded.iter().zip(original).map(|(a, b)| (f64::from(*a), f64::from(*b))) {
        sums.0 += square(a - b);
        sums.1 += square(b);
    }
    sums
}

/// Whether the error is over `bound` times the norm; an error on rows of zeros always is.
fn is_over((error, norm): Sums, bound: f32) -> bool {
    error.sqrt() > f64::from(bound) * norm.sqrt()
}
