//! Scalar levels of least mean squared error (Lloyd, 1957; Max, 1960), trained on samples.

/// Rounds of moving levels; most tables stand still long before.
const ROUNDS: usize = 200;

/// Fills `levels`, ascending, for `points` in ascending order; returns the mean squared error
/// that they leave. Without points the levels are zero and the error is one.
pub(crate) fn train_levels(points: &[f32], levels: &mut [f32]) -> f64 {
    levels.fill(0.0);
    let (n, count) = (points.len(), levels.len());
    if n == 0 {
        return 1.0;
    }
    let sums = prefix_sums(points.iter().map(|x| f64::from(*x)));
    let squares = prefix_sums(points.iter().map(|x| f64::from(*x) * f64::from(*x)));
    // The points of a cell.
    let mut edges: Vec<usize> = (0..=count).map(|i| i * n / count).collect();
    let mut centres = vec![0f64; count];
    for _ in 0..ROUNDS {
        for (i, centre) in centres.iter_mut().enumerate() {
            let (from, to) = (edges[i], edges[i + 1]);
            // An empty cell stays at the point where it is.
            *centre = if from < to {
                (sums[to] - sums[from]) / (to - from) as f64
            } else {
                f64::from(points[from.min(n - 1)])
            };
        }
        let mut moved = false;
        for i in 1..count {
            let middle = f64::midpoint(centres[i - 1], centres[i]);
            let edge = points.partition_point(|x| f64::from(*x) <= middle);
            moved |= edge != edges[i];
            edges[i] = edge;
        }
        if !moved {
            break;
        }
    }
    let mut error = 0.0;
    for (i, (level, centre)) in levels.iter_mut().zip(&centres).enumerate() {
        let (from, to) = (edges[i], edges[i + 1]);
        let (sum, square) = (sums[to] - sums[from], squares[to] - squares[from]);
        error += square - 2.0 * centre * sum + centre * centre * (to - from) as f64;
        *level = *centre as f32;
    }
    error.max(0.0) / n as f64
}

/// The mean squared error of `points`, in ascending order, at the nearest of `levels`.
pub(crate) fn mean_squared_error(points: &[f32], levels: &[f32]) -> f64 {
    let mut level = 0;
    let mut error = 0f64;
    for x in points {
        while level + 1 < levels.len() && levels[level].midpoint(levels[level + 1]) < *x {
            level += 1;
        }
        error += f64::from(x - levels[level]).powi(2);
    }
    if points.is_empty() { 1.0 } else { error / points.len() as f64 }
}

fn prefix_sums(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut sum = 0.0;
    let sums = values.map(|x| {
        sum += x;
        sum
    });
    std::iter::once(0.0).chain(sums).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Points of a normal distribution at equal steps of its distribution function, by bisection
    /// on a series for it.
    fn normal(count: usize) -> Vec<f32> {
        let distribution = |x: f64| {
            // Φ(x) = 1/2 + φ(x) (x + x³/3 + x⁵/15 + …).
            let (mut term, mut sum, mut n) = (x, x, 1.0);
            while f64::abs(term) > 1e-17 {
                n += 2.0;
                term *= x * x / n;
                sum += term;
            }
            0.5 + sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
        };
        let quantile = |p: f64| {
            let (mut low, mut high) = (-6.0, 6.0);
            for _ in 0..50 {
                let middle = f64::midpoint(low, high);
                *(if distribution(middle) < p { &mut low } else { &mut high }) = middle;
            }
            low as f32
        };
        (0..count).map(|i| quantile((i as f64 + 0.5) / count as f64)).collect()
    }

    #[test]
    fn levels_of_a_normal_source_are_those_of_max() {
        // Max (1960), table I: mean squared errors of 2, 4, 8 and 16 levels.
        let points = normal(20_000);
        for (width, error) in [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)] {
            let mut levels = vec![0f32; 1 << width];
            let got = train_levels(&points, &mut levels);
            assert!((got / error - 1.0).abs() < 0.01, "{width} bits: {got}, expected {error}");
            assert!(levels.windows(2).all(|pair| pair[0] < pair[1]), "{levels:?}");
            assert!((mean_squared_error(&points, &levels) / got - 1.0).abs() < 1e-3);
            // Levels that bytes hold are hardly worse.
            kvd_codec::fitting::snap_to_levels(&mut levels);
            assert!(mean_squared_error(&points, &levels) < 1.01 * got);
        }
        let mut two = [0f32; 2];
        train_levels(&points, &mut two);
        assert!((two[1] - 0.798).abs() < 0.002 && (two[0] + 0.798).abs() < 0.002, "{two:?}");
    }

    #[test]
    fn few_or_equal_points_need_no_more_levels() {
        let mut levels = [9f32; 8];
        assert_eq!(train_levels(&[], &mut levels), 1.0);
        assert_eq!(levels, [0.0; 8]);
        assert_eq!(train_levels(&[2.0; 5], &mut levels), 0.0);
        assert_eq!(levels, [2.0; 8]);
        assert!(train_levels(&[-1.0, 0.0, 3.0], &mut levels) < 1e-12);
    }
}
