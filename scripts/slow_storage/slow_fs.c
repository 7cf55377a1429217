/* A file system whose reads take a set time: a folder, read-only, through FUSE.
 *
 *     cc -O2 slow_fs.c -o slow_fs $(pkg-config fuse3 --cflags --libs)
 *     ./slow_fs FOLDER MOUNT LATENCY_US IN_FLIGHT [direct]     # in the foreground; umount MOUNT ends it
 *
 * Each read waits LATENCY_US microseconds, however much it reads, and then answers from FOLDER. The kernel has
 * at most IN_FLIGHT reads of its own (read-ahead, and so hints) under way at once. `direct`: nothing is kept in
 * the page cache, so hints do nothing and files cannot be mapped. The file `.reads` of the mount, which `ls`
 * does not show, says how many reads and bytes there were so far. While FOLDER has a file `.fail`, every read
 * is an input/output error. */

#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define COUNTERS "/.reads"

static int folder;
static long latency_us;
static unsigned in_flight;
static int direct;
static atomic_long reads, bytes;

static const char *inside(const char *path) { return path[1] ? path + 1 : "."; }

static int slow_getattr(const char *path, struct stat *status, struct fuse_file_info *info) {
    (void)info;
    if (!strcmp(path, COUNTERS)) {
        memset(status, 0, sizeof *status);
        status->st_mode = S_IFREG | 0444;
        status->st_nlink = 1;
        return 0;
    }
    return fstatat(folder, inside(path), status, AT_SYMLINK_NOFOLLOW) ? -errno : 0;
}

static int slow_readdir(const char *path, void *entries, fuse_fill_dir_t fill, off_t offset,
                        struct fuse_file_info *info, enum fuse_readdir_flags flags) {
    (void)offset, (void)info, (void)flags;
    int fd = openat(folder, inside(path), O_RDONLY | O_DIRECTORY);
    DIR *listed = fd < 0 ? NULL : fdopendir(fd);
    if (!listed)
        return -errno;
    for (struct dirent *entry; (entry = readdir(listed));)
        fill(entries, entry->d_name, NULL, 0, 0);
    closedir(listed);
    return 0;
}

static int slow_open(const char *path, struct fuse_file_info *info) {
    int counters = !strcmp(path, COUNTERS);
    int fd = openat(folder, counters ? "." : inside(path), O_RDONLY);
    if (fd < 0)
        return -errno;
    info->fh = fd;
    info->direct_io = direct || counters;
    return 0;
}

static int slow_read(const char *path, char *out, size_t size, off_t offset, struct fuse_file_info *info) {
    if (!strcmp(path, COUNTERS))
        return offset ? 0 : snprintf(out, size, "%ld %ld\n", reads, bytes);
    struct timespec wait = {latency_us / 1000000, latency_us % 1000000 * 1000};
    nanosleep(&wait, NULL);
    if (!faccessat(folder, ".fail", F_OK, 0))
        return -EIO;
    ssize_t found = pread(info->fh, out, size, offset);
    if (found < 0)
        return -errno;
    reads++;
    bytes += found;
    return found;
}

static int slow_release(const char *path, struct fuse_file_info *info) {
    (void)path;
    close(info->fh);
    return 0;
}

static void *slow_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    (void)config;
    connection->max_background = in_flight;
    connection->congestion_threshold = in_flight;
    return NULL;
}

static const struct fuse_operations operations = {
    .getattr = slow_getattr, .readdir = slow_readdir, .open = slow_open,
    .read = slow_read,       .release = slow_release, .init = slow_init,
};

int main(int count, char **words) {
    if (count < 5) {
        fprintf(stderr, "usage: slow_fs FOLDER MOUNT LATENCY_US IN_FLIGHT [direct]\n");
        return 2;
    }
    folder = open(words[1], O_RDONLY | O_DIRECTORY);
    if (folder < 0) {
        perror(words[1]);
        return 1;
    }
    latency_us = atol(words[3]);
    in_flight = atoi(words[4]);
    direct = count > 5 && !strcmp(words[5], "direct");
#if FUSE_VERSION >= 312
    char *options = "ro,fsname=slow,max_threads=512,max_idle_threads=512"; /* 10 threads by default */
#else
    char *options = "ro,fsname=slow";
#endif
    char *arguments[] = {words[0], "-f", "-o", options, words[2], NULL};
    return fuse_main(5, arguments, &operations, NULL);
}
