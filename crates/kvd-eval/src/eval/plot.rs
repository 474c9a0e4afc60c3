//! Bits per value against KL as an SVG, with the Pareto front.
//!
//! Written by hand: one scatter plot is shorter than a plotting crate's set-up, and a crate's
//! SVG would carry fixed colours, where these follow the reader's light or dark scheme.

use super::tables::{packs_nothing, row_label};
use super::{EvalBlock, EvalReport};
use std::fmt::Write;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 600.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 55.0;

/// Below this a run differs from the reference by rounding alone; such rows are left out.
const KL_LEAST: f64 = 1e-7;

const STYLE: &str = "\
text{font:12px system-ui,sans-serif;fill:#59636e}.title{font-size:15px;fill:#1f2328}\
.axis{stroke:#8c959f}.grid{stroke:#8c959f;stroke-opacity:.25}.front{stroke:#0969da;fill:none;\
stroke-width:1.5;stroke-dasharray:5 4}.point{fill:#6e7781}.point.best{fill:#0969da}\
.name{fill:#424a53}.name.best{fill:#0969da;font-weight:600}.lead{stroke:#8c959f;stroke-width:.7}\
@media(prefers-color-scheme:dark){text{fill:#9198a1}.title{fill:#f0f6fc}.point{fill:#8b949e}\
.point.best{fill:#58a6ff}.front{stroke:#58a6ff}.name{fill:#c9d1d9}.name.best{fill:#58a6ff}}";

/// One codec.
#[derive(Clone, Debug, PartialEq)]
struct PlotPoint {
    name: String,
    bits: f64,
    kl: f64,
    /// No other codec has fewer bits and less KL.
    best: bool,
}

/// The plot of the first block under equal windows, else of the first. Rows that equal the run
/// without kvd are left out.
#[must_use]
pub fn plot_svg(report: &EvalReport) -> String {
    let equal = report.blocks.iter().find(|block| block.windows != "own");
    let Some(block) = equal.or(report.blocks.first()) else { return String::new() };
    let points = plot_points(block);
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_plot(&mut text, &points, report, block);
    text
}

fn plot_points(block: &EvalBlock) -> Vec<PlotPoint> {
    let rows =
        block.rows.iter().filter(|row| row.quality.kl_nats > KL_LEAST && !packs_nothing(row));
    let point = |row| {
        let row: &super::EvalRow = row;
        let (bits, kl) = (row.storage.bits_per_value, row.quality.kl_nats);
        PlotPoint { name: row_label(block, row), bits, kl, best: false }
    };
    let mut points: Vec<PlotPoint> = rows.map(point).collect();
    points.sort_by(|a, b| a.bits.total_cmp(&b.bits).then(a.kl.total_cmp(&b.kl)));
    let mut least = f64::INFINITY;
    for point in &mut points {
        point.best = point.kl < least;
        least = least.min(point.kl);
    }
    points
}

/// The plane: bits from left to right, the logarithm of KL from bottom to top.
struct PlotScale {
    bits: [f64; 2],
    decades: [f64; 2],
}

impl PlotScale {
    fn new(points: &[PlotPoint]) -> Self {
        let bits = points.iter().map(|point| point.bits);
        let kl = points.iter().map(|point| point.kl.log10());
        let span = |values: &mut dyn Iterator<Item = f64>| {
            values.fold([f64::INFINITY, f64::NEG_INFINITY], |[a, b], x| [a.min(x), b.max(x)])
        };
        let [low, high] = span(&mut bits.into_iter());
        let [least, most] = span(&mut kl.into_iter());
        let decades = [least.floor(), most.ceil().max(least.floor() + 1.0)];
        Self { bits: [(low - 0.5).floor().max(0.0), (high + 0.7).ceil()], decades }
    }

    fn x_position(&self, bits: f64) -> f64 {
        LEFT + (bits - self.bits[0]) / (self.bits[1] - self.bits[0]) * (WIDTH - LEFT - RIGHT)
    }

    fn y_position(&self, kl: f64) -> f64 {
        let [low, high] = self.decades;
        TOP + (high - kl.log10()) / (high - low) * (HEIGHT - TOP - BOTTOM)
    }
}

fn write_plot(
    text: &mut String,
    points: &[PlotPoint],
    report: &EvalReport,
    block: &EvalBlock,
) -> std::fmt::Result {
    writeln!(
        text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         role=\"img\"><title>Bits per value against KL divergence</title><style>{STYLE}</style>"
    )?;
    let windows = if block.windows == "own" { "own windows" } else { &block.windows };
    writeln!(
        text,
        "<text class=\"title\" x=\"{LEFT}\" y=\"28\">{}: bits per stored value against KL, {}, \
         text {}</text>",
        escape_xml(&report.model.name),
        escape_xml(windows),
        escape_xml(&block.text)
    )?;
    if !points.is_empty() {
        let scale = PlotScale::new(points);
        write_axes(text, &scale)?;
        write_front(text, points, &scale)?;
        write_points(text, points, &scale)?;
    }
    writeln!(text, "</svg>")
}

fn write_axes(text: &mut String, scale: &PlotScale) -> std::fmt::Result {
    let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    for bits in scale.bits[0] as i32..=scale.bits[1] as i32 {
        let x = scale.x_position(f64::from(bits));
        writeln!(
            text,
            "<path class=\"grid\" d=\"M{x:.1} {TOP}V{bottom}\"/><text x=\"{x:.1}\" y=\"{:.1}\" \
             text-anchor=\"middle\">{bits}</text>",
            bottom + 18.0
        )?;
    }
    for decade in scale.decades[0] as i32..=scale.decades[1] as i32 {
        let y = scale.y_position(10f64.powi(decade));
        writeln!(
            text,
            "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/><text x=\"{:.1}\" y=\"{:.1}\" \
             text-anchor=\"end\">1e{decade}</text>",
            LEFT - 8.0,
            y + 4.0
        )?;
    }
    writeln!(
        text,
        "<path class=\"axis\" fill=\"none\" d=\"M{LEFT} {TOP}V{bottom}H{right}\"/><text \
         x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">bits per value, packed blocks, everything \
         counted</text><text transform=\"translate(18 {:.1}) rotate(-90)\" \
         text-anchor=\"middle\">KL to the run without kvd, nats per token</text>",
        (LEFT + right) / 2.0,
        HEIGHT - 14.0,
        (TOP + bottom) / 2.0
    )
}

fn write_front(text: &mut String, points: &[PlotPoint], scale: &PlotScale) -> std::fmt::Result {
    let best = points.iter().filter(|point| point.best);
    let corner = |point: &PlotPoint| {
        format!("{:.1},{:.1}", scale.x_position(point.bits), scale.y_position(point.kl))
    };
    let line: Vec<String> = best.map(corner).collect();
    writeln!(text, "<polyline class=\"front\" points=\"{}\"/>", line.join(" "))
}

/// A rectangle: left, top, right, bottom.
type PlotArea = [f64; 4];

fn areas_overlap(a: &PlotArea, b: &PlotArea) -> bool {
    a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]
}

fn write_points(text: &mut String, points: &[PlotPoint], scale: &PlotScale) -> std::fmt::Result {
    let places: Vec<(f64, f64)> = points
        .iter()
        .map(|point| (scale.x_position(point.bits), scale.y_position(point.kl)))
        .collect();
    let mut taken: Vec<PlotArea> =
        places.iter().map(|(x, y)| [x - 5.0, y - 5.0, x + 5.0, y + 5.0]).collect();
    for (point, &(x, y)) in points.iter().zip(&places) {
        let area = label_area(&point.name, x, y, &taken);
        taken.push(area);
        let class = if point.best { " best" } else { "" };
        let [left, top, right, bottom] = area;
        let (near_x, near_y) = (x.clamp(left, right), y.clamp(top, bottom));
        if (near_x - x).hypot(near_y - y) > 12.0 {
            writeln!(text, "<path class=\"lead\" d=\"M{x:.1} {y:.1}L{near_x:.1} {near_y:.1}\"/>")?;
        }
        writeln!(
            text,
            "<circle class=\"point{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4\"/><text \
             class=\"name{class}\" x=\"{left:.1}\" y=\"{:.1}\">{}</text>",
            bottom - 3.0,
            escape_xml(&point.name)
        )?;
    }
    Ok(())
}

/// A free place for a label: beside the point, else on circles of growing size around it.
fn label_area(name: &str, x: f64, y: f64, taken: &[PlotArea]) -> PlotArea {
    let (width, height) = (7.0 * name.chars().count() as f64, 15.0);
    let at = |centre_x: f64, centre_y: f64| {
        [centre_x, centre_y - height / 2.0, centre_x + width, centre_y + height / 2.0]
    };
    let inside = |area: &PlotArea| {
        area[0] >= LEFT && area[1] >= TOP && area[2] <= WIDTH && area[3] <= HEIGHT - BOTTOM
    };
    let free =
        |area: &PlotArea| inside(area) && !taken.iter().any(|other| areas_overlap(area, other));
    let ring = |step: usize| {
        let distance = 8.0 + 6.0 * step as f64;
        (0..16).map(move |turn| {
            let (sin, cos) = (f64::from(turn) / 8.0 * std::f64::consts::PI).sin_cos();
            let left = if cos < -0.3 { -width } else { -width / 2.0 * (1.0 - cos.abs().min(1.0)) };
            let left = if cos > 0.3 { 0.0 } else { left };
            at(x + distance * cos + left, y + distance * sin)
        })
    };
    (0..40).flat_map(ring).find(free).unwrap_or_else(|| at(x + 8.0, y))
}

fn escape_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(name: &str, bits: f64, kl: f64) -> PlotPoint {
        PlotPoint { name: name.to_owned(), bits, kl, best: false }
    }

    #[test]
    fn more_bits_go_right_and_more_kl_goes_up() {
        let scale = PlotScale::new(&[point("a", 1.6, 2e-2), point("b", 8.0, 3e-4)]);
        assert_eq!((scale.bits, scale.decades), ([1.0, 9.0], [-4.0, -1.0]));
        assert!(
            scale.x_position(2.0) < scale.x_position(3.0)
                && scale.y_position(1e-2) < scale.y_position(1e-3)
        );
        assert_eq!((scale.x_position(1.0), scale.y_position(0.1)), (LEFT, TOP));
    }

    #[test]
    fn labels_of_crowded_points_do_not_overlap() {
        let mut taken = Vec::new();
        for index in 0..12 {
            let (x, y) = (300.0 + f64::from(index % 3), 300.0 + f64::from(index));
            let area = label_area("vecinfer-1.25", x, y, &taken);
            assert!(!taken.iter().any(|other| areas_overlap(&area, other)), "{index}");
            taken.push(area);
        }
    }

    #[test]
    fn names_are_escaped() {
        assert_eq!(escape_xml("a<b&c>"), "a&lt;b&amp;c&gt;");
    }
}
