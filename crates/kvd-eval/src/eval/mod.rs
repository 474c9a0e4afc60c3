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

pub(crate) use calibrations::Calibrations;
pub use codec::{EvalCodec, Windows};
pub use markdown::page;
pub use options::EvalOptions;
pub use orderings::{Ordering, orderings};
pub use plot::svg;
pub use report::{Block, ContextBits, EvalReport, EvalRow, EvalSetup};
pub use run::run;
pub(crate) use run::{Session, evaluate};
pub use tables::{Width, print, text};
