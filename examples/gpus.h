// Finds ranks that share a GPU, which NCCL refuses. Knows nothing of LibTorch.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace examples {

// Describes the GPU of this number among those that the process sees, by the same text on ranks
// that share it. NCCL compares GPUs in this way: by the host, which NCCL_HOSTID may rename, and the
// PCI bus. The number alone says nothing where each rank sees one GPU of its own. Call it after
// CUDA was loaded.
inline std::string place_of_gpu(int number) {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  const char* const given = std::getenv("NCCL_HOSTID");
  const std::string host = given != nullptr && *given != '\0' ? given : name;
  using GetBus = int (*)(char* text, int size, int number);
  const auto get_bus = reinterpret_cast<GetBus>(dlsym(RTLD_DEFAULT, "cudaDeviceGetPCIBusId"));
  char bus[32] = {};
  if (get_bus != nullptr && get_bus(bus, sizeof bus, number) == 0) return host + " " + bus;
  // The host's number for this GPU.
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  std::istringstream numbers(visible != nullptr ? visible : "");
  std::string of_host;
  for (int i = 0; i <= number; ++i) {
    if (!std::getline(numbers, of_host, ',')) return host + " " + std::to_string(number);
  }
  return host + " " + of_host;
}

// Gives "ranks 0 and 2 would share a GPU" from each rank's place; empty if no ranks do.
inline std::string who_shares_a_gpu(const std::vector<std::string>& places) {
  std::map<std::string, std::size_t> ranks;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    const auto [other, is_first] = ranks.emplace(places[rank], rank);
    if (is_first) continue;
    return "ranks " + std::to_string(other->second) + " and " + std::to_string(rank) +
           " would share a GPU";
  }
  return "";
}

}  // namespace examples
