//! Calls of the system on files: access at an offset, by which threads share a handle; bytes on the
//! disk, and bytes that still fit; and hints, which the system may ignore.

use std::fs::{File, Metadata};
use std::io;

/// Bytes of a hint. Linux reads no more at once than the largest request of the disk, which is
/// seldom less, and ignores the rest of a hint.
#[cfg(target_os = "linux")]
const HINT: u64 = 128 << 10;

/// Fills a buffer from an offset on.
#[cfg(unix)]
pub(crate) fn read_exact_at(file: &File, into: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, into, offset)
}

/// Writes bytes from an offset on.
#[cfg(unix)]
pub(crate) fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Handles have one position elsewhere: one thread at a time may move any of them.
#[cfg(not(unix))]
static POSITIONS: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// Fills a buffer from an offset on.
#[cfg(not(unix))]
pub(crate) fn read_exact_at(mut file: &File, into: &mut [u8], offset: u64) -> io::Result<()> {
    use std::io::{Read, Seek, SeekFrom};

    let _alone = POSITIONS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(into)
}

/// Writes bytes from an offset on.
#[cfg(not(unix))]
pub(crate) fn write_all_at(mut file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    use std::io::{Seek, SeekFrom, Write};

    let _alone = POSITIONS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    file.seek(SeekFrom::Start(offset))?;
    file.write_all(bytes)
}

/// Bytes that a file has on the disk, of which holes take none.
#[cfg(unix)]
pub(crate) fn bytes_on_disk(file: &Metadata) -> u64 {
    // In units of 512 bytes, whatever the blocks of the file system (POSIX, `st_blocks`).
    std::os::unix::fs::MetadataExt::blocks(file) * 512
}

/// Bytes that a file has on the disk, of which holes take none.
#[cfg(not(unix))]
pub(crate) fn bytes_on_disk(file: &Metadata) -> u64 {
    file.len()
}

/// Returns true if two are of one file.
#[cfg(unix)]
pub(crate) fn is_same(one: &Metadata, other: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;

    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Returns true if two are of one file: not known, and open files cannot be replaced here.
#[cfg(not(unix))]
pub(crate) fn is_same(_: &Metadata, _: &Metadata) -> bool {
    true
}

/// Bytes that may still be written where a file or folder is, if the file system says so.
#[cfg(target_os = "linux")]
pub(crate) fn free_bytes(there: &File) -> Option<u64> {
    use std::os::fd::AsRawFd;

    let mut found = std::mem::MaybeUninit::<libc::statvfs64>::zeroed();
    // SAFETY: the descriptor is open, and the struct is one that the call fills.
    let known = unsafe { libc::fstatvfs64(there.as_raw_fd(), found.as_mut_ptr()) } == 0;
    // SAFETY: zeros are a value of it, and the call has written nothing else.
    let found = unsafe { found.assume_init() };
    // Some say nothing: they have no blocks at all.
    (known && found.f_blocks > 0).then(|| found.f_bavail * found.f_frsize)
}

/// Bytes that may still be written where a file or folder is, if the file system says so.
#[cfg(not(target_os = "linux"))]
pub(crate) fn free_bytes(_: &File) -> Option<u64> {
    None
}

/// Says that bytes of a file will be read: the system may begin, and does not wait for it.
#[cfg(target_os = "linux")]
pub(crate) fn will_read(file: &File, offset: u64, bytes: u64) {
    use std::os::fd::AsRawFd;

    for begin in (offset..offset + bytes).step_by(HINT as usize) {
        let length = HINT.min(offset + bytes - begin);
        // SAFETY: the descriptor is open; no memory is involved. Whatever is wrong shows when the
        // bytes are read.
        unsafe {
            libc::posix_fadvise64(
                file.as_raw_fd(),
                begin as i64,
                length as i64,
                libc::POSIX_FADV_WILLNEED,
            );
        }
    }
}

/// Says that bytes of a file will be read: only Linux is told.
#[cfg(not(target_os = "linux"))]
pub(crate) fn will_read(_: &File, _: u64, _: u64) {}

/// Begins to bring bytes that were written to the disk, and does not wait for it.
#[cfg(target_os = "linux")]
pub(crate) fn begin_to_sync(file: &File, offset: u64, bytes: usize) {
    use std::os::fd::AsRawFd;

    // SAFETY: the descriptor is open; no memory is involved. Whatever is wrong shows when the file
    // is synchronized.
    unsafe {
        libc::sync_file_range(
            file.as_raw_fd(),
            offset as i64,
            bytes as i64,
            libc::SYNC_FILE_RANGE_WRITE,
        );
    }
}

/// Begins to bring bytes that were written to the disk: only Linux is told.
#[cfg(not(target_os = "linux"))]
pub(crate) fn begin_to_sync(_: &File, _: u64, _: usize) {}
