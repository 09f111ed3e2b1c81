//! The header: who recorded, and the settings of the manager.

use super::code::{Bytes, Field};
use super::error::TraceError;
use super::frame::Frames;
use crate::config::Config;
use crate::eviction::Eviction;

/// What the header holds.
pub(super) struct Header {
    pub(super) recorded_by: String,
    pub(super) config: Config,
}

/// The body of the header of a recording of this version; `seed` is the one in force.
pub(super) fn header(config: &Config, seed: u64) -> Vec<u8> {
    let mut out = Vec::new();
    Box::<[u8]>::from(env!("CARGO_PKG_VERSION").as_bytes()).put(&mut out);
    for (setting, value) in settings(config, seed) {
        setting.put(&mut out);
        value.put(&mut out);
    }
    out
}

/// Every setting by its number. A setting that is a list gives its number once for each element.
fn settings(config: &Config, seed: u64) -> Vec<(u64, u64)> {
    let Config {
        num_blocks,
        block_size,
        groups,
        prefix_caching,
        in_flight_sharing,
        events,
        eviction,
        hash_seed: _, // perhaps none: `seed` is what came of it
        hash_bits,
    } = config;
    let mut settings = vec![
        (1, *num_blocks as u64),
        (2, *block_size as u64),
        (3, u64::from(*prefix_caching)),
        (4, u64::from(*in_flight_sharing)),
        (5, u64::from(*events)),
        (6, *eviction as u64),
        (7, seed),
        (8, u64::from(*hash_bits)),
    ];
    // 0: no window; else the window and one more.
    let windows = groups.iter();
    settings.extend(windows.map(|window| (9, window.map_or(0, |window| window as u64 + 1))));
    settings
}

/// Puts a setting into place; false if there is none of this number.
fn set(config: &mut Config, setting: u64, value: u64) -> Result<bool, String> {
    let too_large = |_| format!("setting number {setting} cannot be {value}");
    match setting {
        1 => config.num_blocks = value.try_into().map_err(too_large)?,
        2 => config.block_size = value.try_into().map_err(too_large)?,
        3 => config.prefix_caching = value != 0,
        4 => config.in_flight_sharing = value != 0,
        5 => config.events = value != 0,
        6 => {
            let index = usize::try_from(value).map_err(too_large)?;
            let policy = Eviction::NAMES.get(index);
            config.eviction = policy
                .ok_or(format!("no eviction policy has number {value}"))?
                .1;
        }
        7 => config.hash_seed = Some(value),
        8 => config.hash_bits = value.try_into().map_err(too_large)?,
        9 => {
            let window = value.checked_sub(1).map(usize::try_from).transpose();
            config.groups.push(window.map_err(too_large)?);
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Reads the header. Nothing of it is believed yet: `BlockManager::new` looks at the settings.
pub(super) fn read_header<R: std::io::Read>(frames: &mut Frames<R>) -> Result<Header, TraceError> {
    if !frames.next()? {
        return Err(frames.cut());
    }
    let corrupt = |what| frames.corrupt(what);
    let mut body = Bytes::new(frames.body());
    let recorded_by = body.bytes().map_err(corrupt)?;
    let recorded_by = String::from_utf8_lossy(recorded_by).into_owned();
    let mut config = Config {
        groups: Vec::new(),
        ..Config::new(0, 0)
    };
    while !body.is_empty() {
        let setting = u64::take(&mut body).map_err(corrupt)?;
        let value = u64::take(&mut body).map_err(corrupt)?;
        if !set(&mut config, setting, value).map_err(corrupt)? {
            return Err(TraceError::UnknownSetting {
                setting,
                recorded_by,
            });
        }
    }
    Ok(Header {
        recorded_by,
        config,
    })
}
