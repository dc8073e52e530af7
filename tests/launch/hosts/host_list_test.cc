#include "launch/hosts/host_list.h"

#include <gtest/gtest.h>

namespace sirtaki::launch {
namespace {

std::string Listed(std::string_view text) {
  HostList hosts;
  const core::Status status = ParseHosts(text, "-H", &hosts);
  return status.ok() ? HostsText(hosts) : status.message();
}

std::string OfFile(std::string_view text) {
  HostList hosts;
  const core::Status status = ParseHostFile(text, "hosts.txt", &hosts);
  return status.ok() ? HostsText(hosts) : status.message();
}

std::string Filtered(std::string_view filter, bool include) {
  HostList hosts = {{"a", 4, {}}, {"b", 2, {}}, {"c", 1, {}}};
  const core::Status status = FilterHosts(filter, include, "--filter", &hosts);
  if (!status.ok()) return status.message();
  std::string text = HostsText(hosts);
  for (const Host& host : hosts) {
    for (const int device : host.devices) text += " " + host.name + std::to_string(device);
  }
  return text;
}

TEST(HostListTest, ReadsHostsAndSlots) {
  EXPECT_EQ(Listed("a:4,b.example.org:16"), "a:4,b.example.org:16");
  EXPECT_EQ(Listed("a,node-1_x"), "a:1,node-1_x:1");
  EXPECT_EQ(Listed("a:1,b:2,a:3"), "a:4,b:2");
}

TEST(HostListTest, RefusesWhatIsNoListOfHosts) {
  EXPECT_EQ(Listed(""), "-H: names no host; expected hosts as in a:4,b:4");
  EXPECT_EQ(Listed("a:0"), "-H: \"0\" is not a number of slots; allowed is 1 to 65536");
  EXPECT_EQ(Listed("a:four"), "-H: \"four\" is not a number of slots; allowed is 1 to 65536");
  EXPECT_EQ(Listed("a:4:4"), "-H: \"4:4\" is not a number of slots; allowed is 1 to 65536");
  EXPECT_EQ(Listed("a:99999999999"),
            "-H: \"99999999999\" is not a number of slots; allowed is 1 to 65536");
  for (const char* text : {",a", "a,", "a b", ":4", "-oProxyCommand=x", "a;b"}) {
    EXPECT_NE(Listed(text).find("is not a host's name"), std::string::npos) << Listed(text);
  }
}

TEST(HostListTest, ReadsBothFormsOfAFile) {
  EXPECT_EQ(OfFile("a slots = 4 max-slots=8\nb max_slots = 2\n"), OfFile("a slots=4\nb\n"));
  EXPECT_EQ(OfFile("# our cluster\na slots=4\n\n  b:2   # the old one\r\nc\n\td\tslots=1"),
            "a:4,b:2,c:1,d:1");
}

TEST(HostListTest, HostsOfAFileAddUp) { EXPECT_EQ(OfFile("a\nb\na\na\n"), "a:3,b:1"); }

TEST(HostListTest, NamesTheLineThatIsWrong) {
  EXPECT_EQ(OfFile("a slots=4\nb slots=x\n"),
            "\"hosts.txt\", line 2: \"x\" is not a number of slots; allowed is 1 to 65536");
  EXPECT_EQ(OfFile("# one\n\na max=4\n"),
            "\"hosts.txt\", line 3: \"max=4\" is not understood; a line is \"host slots=4\", "
            "\"host:4\" or \"host\"");
  EXPECT_EQ(OfFile("a:2 slots=2\n"), "\"hosts.txt\", line 1: the slots of \"a\" are given twice");
  EXPECT_EQ(OfFile("a slots=2 slots=3\n"),
            "\"hosts.txt\", line 1: the slots of \"a\" are given twice");
  EXPECT_EQ(OfFile("# nothing\n"), "\"hosts.txt\": names no host");
  EXPECT_EQ(OfFile(""), "\"hosts.txt\": names no host");
  EXPECT_NE(OfFile("a\n\x1b[31m:2\n").find("line 2: \"\\x1b[31m\" is not a host's name"),
            std::string::npos);
}

TEST(HostListTest, AnErrorLeavesTheListAsItWas) {
  HostList hosts = {{"a", 4, {}}};
  EXPECT_FALSE(ParseHosts("b:2,c:0", "-H", &hosts).ok());
  EXPECT_FALSE(ParseHostFile("b\nc:0\n", "f", &hosts).ok());
  EXPECT_FALSE(FilterHosts("a:9", true, "--include", &hosts).ok());
  EXPECT_EQ(hosts, (HostList{{"a", 4, {}}}));
}

TEST(HostListTest, SlotsAreThoseGpusThatTheJobMaySee) {
  const auto chosen = [](const std::string& numbers, const std::string& visible) {
    std::string text;
    const core::Status status = ChooseDevices(numbers, visible, &text);
    return status.ok() ? text : status.message();
  };
  EXPECT_EQ(chosen("1,2", "4,5,6,7"), "5,6");
  EXPECT_EQ(chosen("1", "GPU-8932f937,MIG-GPU-8932f937/1/2"), "MIG-GPU-8932f937/1/2");
  for (const char* none : {"", "-1", "NoDevFiles"}) EXPECT_EQ(chosen("1,2", none), none);
  EXPECT_EQ(chosen("0,1", "4"),
            "slot 1 is to be used, but CUDA_VISIBLE_DEVICES=4 names only 1 GPU there");
}

TEST(HostListTest, IncludesHostsAndSlots) {
  EXPECT_EQ(Filtered("b", true), "b:2");
  EXPECT_EQ(Filtered("c@a:0,2", true), "a:2,c:1 a0 a2");
  EXPECT_EQ(Filtered("a:0@a:1", true), "a:2 a0 a1");
}

TEST(HostListTest, ExcludesHostsAndSlots) {
  EXPECT_EQ(Filtered("b", false), "a:4,c:1");
  EXPECT_EQ(Filtered("a:1,3@c", false), "a:2,b:2 a0 a2");
  EXPECT_EQ(Filtered("c:0", false), "a:4,b:2");
}

TEST(HostListTest, AFilterNamesOnlyWhatThereIs) {
  EXPECT_EQ(Filtered("d", true),
            "--filter: host \"d\" is not among the hosts; the nearest is \"a\"; there are "
            "a:4,b:2,c:1");
  EXPECT_EQ(Filtered("worker-17", true),
            "--filter: host \"worker-17\" is not among the hosts; there are a:4,b:2,c:1");
  EXPECT_EQ(Filtered("b:2", false),
            "--filter: \"2\" is not a slot of host \"b\", which has 0 to 1");
  EXPECT_EQ(Filtered("b:", true), "--filter: no slot follows \"b:\"");
  EXPECT_EQ(Filtered("", true), "--filter: names no host");
  EXPECT_EQ(Filtered("a@b@c", false), "--filter: leaves no slot of a:4,b:2,c:1");
}

}  // namespace
}  // namespace sirtaki::launch
