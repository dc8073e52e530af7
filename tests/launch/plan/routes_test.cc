#include "launch/plan/routes.h"

#include <gtest/gtest.h>

namespace sirtaki::launch {
namespace {

constexpr std::uint32_t Address(std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                std::uint32_t d) {
  return a << 24U | b << 16U | c << 8U | d;
}

TEST(RoutesTest, SubnetsAreWrittenByTheirFirstAddress) {
  EXPECT_EQ(SubnetOf({"eth0", Address(10, 77, 3, 9), 0xffffff00U}), "10.77.3.0/24");
  EXPECT_EQ(SubnetOf({"eth0", Address(10, 77, 3, 9), 0xfffff800U}), "10.77.0.0/21");
  EXPECT_EQ(SubnetOf({"eth0", Address(10, 128, 0, 5), 0xffffffffU}), "10.128.0.5/32");
}

TEST(RoutesTest, AddressesAreWrittenWithDots) {
  EXPECT_EQ(AddressOf({"eth0", Address(10, 77, 3, 9), 0xffffff00U}), "10.77.3.9");
}

TEST(RoutesTest, AnAddressIsInASubnet) {
  EXPECT_TRUE(IsIn(Address(10, 77, 3, 1), "10.77.3.0/24"));
  EXPECT_FALSE(IsIn(Address(10, 77, 4, 1), "10.77.3.0/24"));
  EXPECT_TRUE(IsIn(Address(10, 77, 4, 1), "10.77.0.0/16"));
  EXPECT_TRUE(IsIn(Address(10, 77, 4, 1), "10.77.4.1/32"));
  EXPECT_TRUE(IsIn(Address(1, 2, 3, 4), "0.0.0.0/0"));
  for (const char* wrong : {"", "10.77.3.0", "10.77.3.0/", "10.77.3.0/33", "x/24"}) {
    EXPECT_FALSE(IsIn(Address(10, 77, 3, 0), wrong)) << wrong;
  }
}

TEST(RoutesTest, BridgesOfContainersAreKnownByTheirNames) {
  EXPECT_TRUE(IsOfContainers("docker0"));
  EXPECT_TRUE(IsOfContainers("br-3f0c"));
  EXPECT_FALSE(IsOfContainers("eth0"));
  EXPECT_FALSE(IsOfContainers("bridge0"));
}

TEST(RoutesTest, TheLoopbackIsOfNoUse) {
  const auto route = FindRoute("127.0.0.1");
  ASSERT_TRUE(route.has_value());
  EXPECT_EQ(route->interface, "lo");
  EXPECT_FALSE(route->usable);
  EXPECT_TRUE(InterfacesIn("127.0.0.0/8").empty());
}

TEST(RoutesTest, ANameThatNobodyKnowsHasNoRoute) {
  EXPECT_FALSE(FindRoute("no..such..name").has_value());
}

TEST(RoutesTest, OwnAddressesAreNotOfTheLoopback) {
  for (const std::string& address : OwnAddresses({})) {
    EXPECT_FALSE(address.starts_with("127.")) << address;
    EXPECT_TRUE(FindRoute(address).has_value()) << address;
  }
  EXPECT_TRUE(OwnAddresses({"no-such-one"}).empty());
  EXPECT_TRUE(OwnAddresses({"lo"}).empty());
}

}  // namespace
}  // namespace sirtaki::launch
