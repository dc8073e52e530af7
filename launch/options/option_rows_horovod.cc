// Horovod's flags, with their meaning here. Those for which there is none are accepted where the
// program runs the same without, and refused where it would not.
#include <string>
#include <utility>

#include "launch/options/option_rows.h"

namespace sirtaki::launch {

using core::Status;

namespace {

// Sets the library's option to what Horovod's value means for it.
OptionRow Knob(std::string name, std::string value, std::string_view option,
               std::string (*meaning)(const std::string&)) {
  std::string help = "Sets " + std::string(option) + ".";
  return {std::move(name), 0, std::move(value), std::move(help),
          [option, meaning](const Given& given, LaunchOptions* out) {
            return SetKnob(given, option, meaning(given.value), out);
          }};
}

// A switch that sets the library's option to `on`; if false it says nothing.
OptionRow Sets(std::string name, std::string_view option, std::string on) {
  std::string help = "Sets " + std::string(option) + " to " + on + ".";
  return {std::move(name), 0, "", std::move(help),
          [option, on](const Given& given, LaunchOptions* out) {
            return given.value == "true" ? SetKnob(given, option, on, out) : Status::Ok();
          }};
}

OptionRow Ignored(std::string name, std::string value, std::string why) {
  std::string help = "Changes nothing: " + why + ".";
  return {std::move(name), 0, std::move(value), std::move(help),
          [why](const Given& given, LaunchOptions* out) {
            out->notes.push_back(given.from + " changes nothing: " + why);
            return Status::Ok();
          }};
}

OptionRow Refused(std::string name, std::string value, std::string why) {
  std::string help = "Refused: " + why + ".";
  return {std::move(name), 0, std::move(value), std::move(help),
          [why](const Given& given, LaunchOptions* /*out*/) {
            return given.value == "false" ? Status::Ok() : WrongFlag(given, why);
          }};
}

std::string Same(const std::string& value) { return value; }
std::string Mebibytes(const std::string& value) { return value + "M"; }
std::string AtLeastOne(const std::string& value) { return value == "0" ? "1" : value; }

}  // namespace

OptionGroup HorovodOptions() {
  const std::string one_thread = "one thread at a time calls MPI in any case";
  const std::string no_cycle = "nothing is polled in cycles here";
  const std::string own_tuner = "the autotuner here has no such setting";
  const std::string only_mpi = "ranks are started over MPI, and talk over it";
  const std::string no_elastic = "the number of ranks cannot change during a run";
  return {
      "Horovod's names for these options",
      {Knob("fusion-threshold-mb", "MB", "fusion_bytes", Mebibytes),
       Knob("cache-capacity", "N", "id_capacity", AtLeastOne),
       Sets("hierarchical-allreduce", "hierarchy", "on"),
       Sets("no-hierarchical-allreduce", "hierarchy", "off"),
       Sets("no-autotune", "autotune", "false"),
       Knob("autotune-log-file", "FILE", "autotune_log", Same),
       {"timeline-filename", 0, "FILE", "Sets timeline; DYNAMIC sets none: the program begins one.",
        [](const Given& given, LaunchOptions* out) {
          return given.value == "DYNAMIC" ? Status::Ok()
                                          : SetKnob(given, "timeline", given.value, out);
        }},
       Sets("no-stall-check", "stall_warning", "0"),
       {"stall-check", 0, "", "If false, sets stall_warning to 0.",
        [](const Given& given, LaunchOptions* out) {
          return given.value == "false" ? SetKnob(given, "stall_warning", "0", out) : Status::Ok();
        }},
       Knob("stall-check-warning-time-seconds", "S", "stall_warning", Same),
       Knob("stall-check-shutdown-time-seconds", "S", "stall_limit", Same),
       Ignored("mpi-threads-disable", "", one_thread),
       Ignored("no-mpi-threads-disable", "", one_thread),
       Sets("log-hide-timestamp", "log_time", "false"),
       Sets("log-with-timestamp", "log_time", "true"),
       Sets("no-log-hide-timestamp", "log_time", "true"),
       Ignored("mpi", "", only_mpi),
       Ignored("cycle-time-ms", "MS", no_cycle),
       Ignored("hierarchical-allgather", "", "gathering chooses its algorithm itself"),
       Ignored("no-hierarchical-allgather", "", "gathering chooses its algorithm itself"),
       Ignored("autotune-warmup-samples", "N", own_tuner),
       Ignored("autotune-steps-per-sample", "N", own_tuner),
       Ignored("autotune-bayes-opt-max-samples", "N", own_tuner),
       Ignored("autotune-gaussian-process-noise", "X", own_tuner),
       Ignored("num-nccl-streams", "N", "a device has one lane"),
       Ignored("thread-affinity", "CORE", "the background thread sleeps when it has nothing to do"),
       Ignored("gloo-timeout-seconds", "S", "gloo is not used"),
       Ignored("timeline-mark-cycles", "", no_cycle),
       Ignored("no-timeline-mark-cycles", "", no_cycle),
       Refused("gloo", "", only_mpi),
       Refused("jsrun", "", "jsrun is not known; --launcher takes openmpi, mpich, srun or a path"),
       Refused("tcp", "", "choose MPI's transports by --mpi-args"),
       Refused("min-np", "N", no_elastic),
       Refused("max-np", "N", no_elastic),
       Refused("host-discovery-script", "FILE", no_elastic),
       Refused("slots-per-host", "N", no_elastic),
       Refused("elastic-timeout", "S", no_elastic),
       Refused("reset-limit", "N", no_elastic)}};
}

}  // namespace sirtaki::launch
