//! Shapes of AMX's tiles, and the memory that sets them up.

/// Rows of a tile; its lanes, too.
pub(crate) const ROWS: usize = 16;
/// Bytes of a row of a tile.
pub(crate) const STRIDE: usize = 64;
/// Tiles that the processor has.
pub(crate) const TILES: usize = 8;

/// Rows of a tile, and bytes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) rows: usize,
    pub(crate) bytes: usize,
}

impl Shape {
    /// All that a tile can have.
    pub(crate) const WHOLE: Self = Self {
        rows: ROWS,
        bytes: STRIDE,
    };
}

/// The memory that `LDTILECFG` reads.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub(crate) palette: u8,
    pub(crate) start_row: u8,
    pub(crate) reserved: [u8; 14],
    pub(crate) row_bytes: [u16; 16],
    pub(crate) rows: [u8; 16],
}

impl Config {
    pub(crate) fn of(shapes: &[Shape; TILES]) -> Self {
        let mut config = Self {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        for (tile, shape) in shapes.iter().enumerate() {
            config.row_bytes[tile] = shape.bytes as u16;
            config.rows[tile] = shape.rows as u8;
        }
        config
    }
}
