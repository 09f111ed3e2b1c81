//! The outputs of a product, divided among tasks by rows and columns.

use std::marker::PhantomData;
use std::ops::Range;

/// Some columns of some rows, which no other part has.
pub(crate) struct Part<'a, E> {
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
    /// The first of them.
    first: *mut E,
    /// Columns of all parts.
    width: usize,
    borrowed: PhantomData<&'a mut [E]>,
}

// SAFETY: it is the only one with these outputs.
unsafe impl<E: Send> Send for Part<'_, E> {}

/// `out` `[rows, width]` in parts of so many columns, and of these rows each: in ascending order, none twice. Parts of the
/// same columns follow each other.
pub(crate) fn divided<'a, E>(
    out: &'a mut [E],
    width: usize,
    columns: usize,
    rows: &[Range<usize>],
) -> Vec<Part<'a, E>> {
    let mut end = 0;
    for rows in rows {
        assert!(end <= rows.start && rows.start <= rows.end);
        end = rows.end;
    }
    assert!(end * width <= out.len());
    let first = out.as_mut_ptr();
    let mut parts = Vec::with_capacity(width.div_ceil(columns) * rows.len());
    for column in (0..width).step_by(columns) {
        for rows in rows {
            parts.push(Part {
                rows: rows.clone(),
                columns: column..width.min(column + columns),
                first: first.wrapping_add(rows.start * width + column),
                width,
                borrowed: PhantomData,
            });
        }
    }
    parts
}

impl<'a, E> Part<'a, E> {
    /// The outputs of each row.
    pub(crate) fn into_rows(self) -> Vec<&'a mut [E]> {
        let row = |number: usize| {
            let first = self.first.wrapping_add(number * self.width);
            // SAFETY: they are within what is borrowed, and neither another row nor another part has them.
            unsafe { std::slice::from_raw_parts_mut(first, self.columns.len()) }
        };
        (0..self.rows.len()).map(row).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_output_is_in_one_part() {
        let (width, rows) = (7, [0..2, 2..2, 3..5]);
        let mut out = [0; 35];
        for (number, part) in divided(&mut out, width, 3, &rows).into_iter().enumerate() {
            let (first, columns) = (part.rows.start, part.columns.clone());
            for (row, outputs) in part.into_rows().into_iter().enumerate() {
                assert_eq!(outputs.len(), columns.len());
                for (column, output) in columns.clone().zip(outputs) {
                    assert_eq!(*output, 0);
                    *output = 1000 * (number + 1) + 10 * (first + row) + column;
                }
            }
        }
        for (at, output) in out.into_iter().enumerate() {
            let (row, column) = (at / width, at % width);
            let part = column / 3 * rows.len()
                + rows.iter().position(|it| it.contains(&row)).unwrap_or(99);
            let expected = if row == 2 {
                0
            } else {
                1000 * (part + 1) + 10 * row + column
            };
            assert_eq!(output, expected, "row {row}, column {column}");
        }
    }

    #[test]
    #[should_panic(expected = "end <= rows.start")]
    fn rows_may_not_overlap() {
        divided(&mut [0; 4], 1, 1, &[0..2, 1..3]);
    }

    #[test]
    #[should_panic(expected = "end * width <= out.len()")]
    fn rows_may_not_be_beyond_the_last() {
        divided(&mut [0; 4], 2, 1, &[0..1, 1..3]);
    }
}
