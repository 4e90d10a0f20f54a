// The least that a program over libfabric must do: two processes, fi_writemsg with remote completion data,
// spinning. What our transport is measured against; bench_fabric.py builds and runs it.
//   fabric_minimal PROVIDER ADDRESS ADDRESS NAMESPACE NAMESPACE BYTES ROUNDS -> {"latency_us": [p50, p99],
//   "gb_per_s": x}
// One address and network namespace ("" = this one) per process. Latency: half a
// round trip of one write. Bandwidth: 16 writes in flight, ended by one answer.
#define _GNU_SOURCE
#include <fcntl.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WINDOW = 16 };
static struct fid_ep* ep;
static struct fid_cq* cq;
static struct fid_mr* mr;
static fi_addr_t peer;
static struct fid_av* av;
static struct card {
  char name[64];
  uint64_t base, key;
} own, other;
static char* from;
static size_t in_flight, arrived;
static struct fi_context2 contexts[WINDOW];
static void check(long result, const char* what) {
  if (result == 0) return;
  fprintf(stderr, "%s: %s (%ld)\n", what, fi_strerror((int)-result), result);
  exit(1);
}

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static void poll_queue(void) {
  struct fi_cq_data_entry entries[WINDOW];
  const ssize_t count = fi_cq_read(cq, entries, WINDOW);
  if (count == -FI_EAGAIN) return;
  check(count < 0 ? count : 0, "fi_cq_read");
  for (ssize_t i = 0; i < count; ++i) {
    const int remote = (entries[i].flags & FI_REMOTE_CQ_DATA) != 0;
    arrived += remote;
    in_flight -= !remote;
  }
}

static void put(size_t bytes, uint32_t number) {
  while (in_flight == WINDOW) poll_queue();
  const struct iovec iov = {from, bytes};
  const struct fi_rma_iov rma = {other.base, bytes, other.key};
  struct fi_msg_rma message = {&iov, NULL, 1, peer, &rma, 1, &contexts[number % WINDOW], number};
  ssize_t result;
  while ((result = fi_writemsg(ep, &message, FI_COMPLETION | FI_REMOTE_CQ_DATA)) == -FI_EAGAIN) poll_queue();
  check(result, "fi_writemsg");
  ++in_flight;
}

static void open_endpoint(const char* provider, const char* address, size_t bytes) {
  struct fi_info *hints = fi_allocinfo(), *info;
  struct fid_fabric* fabric;
  struct fid_domain* domain;
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  hints->fabric_attr->prov_name = strdup(provider);
  check(fi_getinfo(FI_VERSION(1, 17), address, NULL, FI_SOURCE, hints, &info), "fi_getinfo");
  check(fi_fabric(info->fabric_attr, &fabric, NULL), "fi_fabric");
  check(fi_domain(fabric, info, &domain, NULL), "fi_domain");
  struct fi_cq_attr cq_attr = {.size = 4096, .format = FI_CQ_FORMAT_DATA};
  check(fi_cq_open(domain, &cq_attr, &cq, NULL), "fi_cq_open");
  struct fi_av_attr av_attr = {.type = FI_AV_TABLE, .count = 1};
  check(fi_av_open(domain, &av_attr, &av, NULL), "fi_av_open");
  check(fi_endpoint(domain, info, &ep, NULL), "fi_endpoint");
  check(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "bind");
  check(fi_ep_bind(ep, &av->fid, 0), "bind");
  check(fi_enable(ep), "fi_enable");
  from = memset(aligned_alloc(4096, bytes + 4096 - bytes % 4096), 1, bytes);
  char* to = memset(aligned_alloc(4096, bytes + 4096 - bytes % 4096), 0, bytes);
  check(fi_mr_reg(domain, to, bytes, FI_REMOTE_WRITE, 0, 1, 0, &mr, NULL), "fi_mr_reg");
  own.base = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)to : 0;
  own.key = fi_mr_key(mr);
  size_t length = sizeof own.name;
  check(fi_getname(&ep->fid, own.name, &length), "fi_getname");
}

static void settle(const char* namespace) {
  char path[256];
  if (namespace[0] == 0) return;
  snprintf(path, sizeof path, "/run/netns/%s", namespace);
  check(setns(open(path, O_RDONLY), CLONE_NEWNET), path);
}

static void meet(int in, int out) {
  if (write(out, &own, sizeof own) != sizeof own || read(in, &other, sizeof other) != sizeof other) exit(1);
  check(fi_av_insert(av, other.name, 1, &peer, 0, NULL) == 1 ? 0 : -FI_EINVAL, "fi_av_insert");
}

static int by_value(const void* a, const void* b) {
  return *(const uint64_t*)a > *(const uint64_t*)b ? 1 : -1;
}

int main(int argc, char** argv) {
  if (argc != 8) return fprintf(stderr, "see the top of the source for its arguments\n"), 2;
  const size_t bytes = strtoull(argv[6], NULL, 10), rounds = strtoull(argv[7], NULL, 10), warm = rounds / 10;
  int up[2], down[2];
  if (pipe(up) != 0 || pipe(down) != 0) return 1;
  const pid_t child = fork();
  const int first = child != 0;
  settle(argv[first ? 4 : 5]);
  open_endpoint(argv[1], argv[first ? 2 : 3], bytes);
  meet(first ? up[0] : down[0], first ? down[1] : up[1]);
  uint64_t* times = calloc(rounds, sizeof *times);
  for (size_t i = 0; i < warm + rounds; ++i) {
    const uint64_t start = now_ns();
    if (first) put(bytes, (uint32_t)i);
    while (arrived < i + 1) poll_queue();
    if (!first) put(bytes, (uint32_t)i);
    if (i >= warm) times[i - warm] = (now_ns() - start) / 2;
  }
  const uint64_t start = now_ns();
  for (size_t i = 0; first && i < rounds; ++i) put(bytes, (uint32_t)i);
  while (arrived < warm + rounds + (first ? 1 : rounds)) poll_queue();
  if (!first) put(1, 0);
  const double seconds = (now_ns() - start) / 1e9;
  while (in_flight != 0) poll_queue();
  if (!first) return 0;
  qsort(times, rounds, sizeof *times, by_value);
  printf("{\"latency_us\": [%.2f, %.2f], \"gb_per_s\": %.3f}\n", times[rounds / 2] / 1e3,
         times[rounds * 99 / 100] / 1e3, bytes * rounds / seconds / 1e9);
  return waitpid(child, NULL, 0) == child ? 0 : 1;
}
