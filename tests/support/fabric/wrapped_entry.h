// The functions by which one enters the wrapped library (wrapped_libfabric.c): they note what they are asked
// for, call the provider below by another name, and take capabilities away. Macros: see there.
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char** environ;
static void* real;
static int (*real_getinfo)(uint32_t, const char*, const char*, uint64_t, const struct fi_info*,
                           struct fi_info**);
static struct fi_info* (*real_dupinfo)(const struct fi_info*);
static void (*real_freeinfo)(struct fi_info*);
static int (*real_fabric)(struct fi_fabric_attr*, struct fid_fabric**, void*);
static uint32_t (*real_version)(void);
static const char* (*real_strerror)(int);

static void note(const char* kind, const char* text) {
  FILE* file = fopen(RECORD, "a");
  if (file == NULL) abort();
  fprintf(file, "%s %s\n", kind, text);
  fclose(file);
}

static void note_number(const char* name, uint64_t value) {
  char text[128];
  snprintf(text, sizeof text, "%s=%llu", name, (unsigned long long)value);
  note("hint", text);
}

__attribute__((constructor)) static void loaded(void) {
  real = dlopen(REAL, RTLD_NOW | RTLD_LOCAL);
  if (real == NULL) abort();
  real_getinfo = dlvsym(real, "fi_getinfo", "FABRIC_1.3");
  real_dupinfo = dlvsym(real, "fi_dupinfo", "FABRIC_1.3");
  real_freeinfo = dlvsym(real, "fi_freeinfo", "FABRIC_1.3");
  real_fabric = dlvsym(real, "fi_fabric", "FABRIC_1.1");
  real_version = dlvsym(real, "fi_version", "FABRIC_1.0");
  real_strerror = dlvsym(real, "fi_strerror", "FABRIC_1.0");
  for (char** one = environ; *one != NULL; ++one)
    if (strncmp(*one, "FI_", 3) == 0) note("env", *one);
}

uint32_t fi_version(void) { return real_version(); }
const char* fi_strerror(int error) { return real_strerror(error); }
void fi_freeinfo(struct fi_info* info) { real_freeinfo(info); }
struct fi_info* fi_dupinfo(const struct fi_info* info) { return real_dupinfo(info); }

static void rename_to(char** name, const char* other) {
  free(*name);
  *name = strdup(other);
}

static void mask(struct fi_info* info, bool hmem) {
  rename_to(&info->fabric_attr->prov_name, NAME);
  info->caps &= ~(uint64_t)(LACKS);
  if (hmem) info->caps |= FI_HMEM;
  if (hmem) info->domain_attr->mr_mode |= FI_MR_HMEM;
  if (info->domain_attr->cq_data_size > CQ_DATA) info->domain_attr->cq_data_size = CQ_DATA;
  if (info->tx_attr->size > MOST_WRITES) info->tx_attr->size = MOST_WRITES;
  if (!STRICT) return;
  info->mode |= FI_RX_CQ_DATA;
  info->domain_attr->mr_mode |= FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  if (info->rx_attr->size > MOST_RECEIVES) info->rx_attr->size = MOST_RECEIVES;
}

// As the provider below knows it.
static struct fi_info* unmask(const struct fi_info* info) {
  struct fi_info* plain = real_dupinfo(info);
  rename_to(&plain->fabric_attr->prov_name, BELOW);
  plain->mode &= ~FI_RX_CQ_DATA;
  plain->caps &= ~FI_HMEM;  // it has none, but takes the memory that stands for a device's
  plain->domain_attr->mr_mode &= ~FI_MR_HMEM;
  return plain;
}

int fi_getinfo(uint32_t version, const char* node, const char* service, uint64_t flags,
               const struct fi_info* hints, struct fi_info** list) {
  note_number("tx_size", hints->tx_attr->size);
  note_number("tclass", hints->tx_attr->tclass);
  note_number("msg_order", hints->tx_attr->msg_order);
  const bool hmem = (hints->caps & FI_HMEM) != 0;
  if (hmem) note_number("hmem_mr_mode", (hints->domain_attr->mr_mode & FI_MR_HMEM) != 0);
  if (hmem && !HMEM) return -FI_ENODATA;
  if (hints->domain_attr->name != NULL) {
    char text[256];
    snprintf(text, sizeof text, "domain=%s", hints->domain_attr->name);
    note("hint", text);
  }
  if ((hints->caps & (uint64_t)(LACKS)) != 0) return -FI_ENODATA;
  if (hints->fabric_attr->prov_name != NULL && strcmp(hints->fabric_attr->prov_name, NAME) != 0)
    return -FI_ENODATA;
  struct fi_info* asked = unmask(hints);
  asked->tx_attr->tclass = 0;  // recorded; the provider below may know none
  if (asked->tx_attr->size > MOST_WRITES) asked->tx_attr->size = MOST_WRITES;
  const int result = real_getinfo(version, node, service, flags, asked, list);
  real_freeinfo(asked);
  for (struct fi_info* info = result == 0 ? *list : NULL; info != NULL; info = info->next) mask(info, hmem);
  return result;
}
