//! `kvd eval`: any list of codecs on a model and held-out text, as tables, JSON and a plot.

mod calibrations;
mod codec;
mod markdown;
mod options;
mod orderings;
mod plot;
mod report;
mod run;
mod tables;
mod texts;

pub(crate) use calibrations::CalibrationSource;
pub use codec::{EvalCodec, WindowChoice};
pub use markdown::markdown_page;
pub use options::EvalOptions;
pub use orderings::{PaperClaim, check_orderings};
pub use plot::plot_svg;
pub use report::{ContextBits, EvalBlock, EvalReport, EvalRow, EvalSetup};
pub use run::run_eval;
pub(crate) use run::{EvalSession, evaluate_codecs};
pub(crate) use tables::wrap_paragraph;
pub use tables::{LineWidth, print_report, report_text};
